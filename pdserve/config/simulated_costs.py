"""Nodes without a device: what ``--engine simulated`` asks for, and how long their steps and reads take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from pdserve.errors import ConfigError
from pdserve.records import ScheduledSequence

ENGINES = ("device", "simulated")

#: What "auto" becomes: the KV cache that an 8B model leaves room for on an H200, in tokens.
KV_TOKENS = 800_000


class SimulatedCosts(msgspec.Struct, frozen=True):
    """Seconds, of a model of 8B parameters in bf16 on an H200, with KV read over NVLink.

    A step takes ``step``, and ``prompt_token`` for each token of a prompt, and ``decode`` for each sequence that
    decodes. A read takes ``read``, and ``read_token`` for each token that its blocks have room for. So decoding 1, 32,
    128 and 256 sequences takes 4.8, 5.4, 7.4 and 9.9 ms a step, and a prompt of 512, 2,048 and 8,192 tokens 17, 54 and
    201 ms; reading the last, 6.7 ms. The length of what came before costs nothing, and config.json does not change the
    costs: it only says what is too long.
    """

    step: float = 4.8e-3
    prompt_token: float = 24e-6
    decode: float = 20e-6
    read: float = 1e-3
    read_token: float = 0.7e-6

    def of_step(self, scheduled: Sequence[ScheduledSequence]) -> float:
        """Seconds. A plan that schedules nothing costs nothing."""
        if not scheduled:
            return 0.0
        prompts = sum(item.num_tokens for item in scheduled if item.num_tokens > 1)
        decodes = sum(item.num_tokens == 1 for item in scheduled)
        return self.step + prompts * self.prompt_token + decodes * self.decode

    def of_read(self, num_tokens: int) -> float:
        """Seconds."""
        return self.read + num_tokens * self.read_token

    def __str__(self) -> str:
        """As ``--sim-costs`` takes it."""
        return ",".join(f"{_flag(name)}={getattr(self, name):g}" for name in self.__struct_fields__)


def choose_costs(changes: Iterable[str], speed: float) -> SimulatedCosts:
    """The default costs with ``changes`` to them, each "name=seconds", divided by ``speed``; ``inf`` is no time at all.

    Raises ConfigError.
    """
    if not speed > 0.0:
        raise ConfigError(f"sim_speed {speed:g} must be above 0; inf lets everything take no time")
    costs = msgspec.structs.asdict(SimulatedCosts())
    for change in changes:
        name, _, text = change.partition("=")
        field = name.replace("-", "_")
        if field not in costs:
            raise ConfigError(f"sim_costs {name!r} is not one of {', '.join(map(_flag, costs))}")
        costs[field] = _seconds(name, text)
    return SimulatedCosts(**{name: seconds / speed for name, seconds in costs.items()})


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < math.inf:
        raise ConfigError(f"sim_costs {name}={text} is no number of seconds; write for example {name}=0.001")
    return seconds


def _flag(field: str) -> str:
    return field.replace("_", "-")
