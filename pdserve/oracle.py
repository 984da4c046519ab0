"""The oracle: decides once per node which model runner it gets, and says why."""

from __future__ import annotations

import msgspec

from pdserve.errors import ConfigError

VARIABLE = "PDSERVE_USE_V2_MODEL_RUNNER"


class Decision(msgspec.Struct, frozen=True):
    """The oracle's answer: which model runner, and why."""

    runner: str  # "V1" or "V2"
    reasons: tuple[str, ...]


def decide(forced: str | None) -> Decision:
    """``forced`` is the value of PDSERVE_USE_V2_MODEL_RUNNER, None where unset.

    Only V1 exists in this version, so forcing V2 is an error rather than a silent V1.
    """
    if forced is None:
        return Decision("V1", ("this version has the V1 runner only",))
    if forced == "0":
        return Decision("V1", (f"{VARIABLE}=0",))
    if forced == "1":
        raise ConfigError(f"{VARIABLE}=1: this version has no V2 runner; unset it or set it to 0")
    raise ConfigError(f"{VARIABLE}={forced!r} is not one of 0, 1 or unset")
