"""The cost model of simulated nodes (``--engine simulated``): how long their steps and reads take."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from pdserve.errors import ConfigError
from pdserve.records import StepPlan

KV_TOKENS = 800_000  # default size of the KV cache in tokens: that of an 8B model on an H200


class SimulatedCosts(msgspec.Struct, frozen=True):
    """Costs in seconds. The defaults describe an 8B model in bf16 on an H200 that reads KV over NVLink.

    A step takes ``step`` + ``prompt_token`` per prompt token and draft + ``decode`` per decoding sequence. A read takes
    ``read`` + ``read_token`` per token of its blocks. So decoding 1, 32, 128 and 256 sequences takes 4.8, 5.4, 7.4 and
    9.9 ms per step, a prompt of 512, 2,048 and 8,192 tokens 17, 54 and 201 ms, and reading the last one 6.7 ms. Neither
    the context length nor the model's config changes the costs.
    """

    step: float = 4.8e-3
    prompt_token: float = 24e-6
    decode: float = 20e-6
    read: float = 1e-3
    read_token: float = 0.7e-6

    def of_step(self, plan: StepPlan) -> float:
        """Return the seconds of a step; 0 for an empty one."""
        if not plan.scheduled:
            return 0.0
        chunk_tokens = plan.num_prompt_tokens + plan.num_drafts
        return self.step + chunk_tokens * self.prompt_token + plan.num_decodes * self.decode

    def of_read(self, num_tokens: int) -> float:
        return self.read + num_tokens * self.read_token

    def __str__(self) -> str:
        """Return the text that ``--sim-costs`` accepts."""
        return ",".join(f"{_flag(name)}={getattr(self, name):g}" for name in self.__struct_fields__)


def choose_costs(changes: Iterable[str], speed: float) -> SimulatedCosts:
    """Return the default costs with ``changes`` ("name=seconds"), divided by ``speed``. Raises ConfigError."""
    if not speed > 0.0:
        raise ConfigError(f"sim_speed {speed:g} must be above 0; inf removes all delays")
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
        raise ConfigError(f"sim_costs {name}={text} is not a number of seconds; use e.g. {name}=0.001")
    return seconds


def _flag(field: str) -> str:
    return field.replace("_", "-")
