"""The cost model of simulated nodes (``--engine simulated``): how long their steps and reads take.

bench/engine_steps.py measures the same costs on a card; cli/virtual_fleet/ uses them without processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import msgspec

from pdserve.errors import ConfigError
from pdserve.images import EncodingCost, ImageInput
from pdserve.records import StepPlan

_HIDDEN_SHARE = 0.23  # fraction of prompt time that the read of the weights hides; measured beside decodes on an H100
KV_TOKENS = 800_000  # default size of the KV cache in tokens: an 8B model on an H200


class StepTokens(msgspec.Struct, frozen=True):
    """Tokens of a step, and the context tokens that they attend to.

    Drafts count as prompt tokens, and so does the work of encoding images.
    """

    decodes: int = 0
    decode_context: int = 0  # tokens in the KV cache, summed over decoding sequences
    prompt_tokens: int = 0
    prompt_context: float = 0.0  # tokens attended to, summed over prompt tokens


class StepSeconds(Protocol):
    """How long the steps and reads of a node without a device take, in seconds."""

    def seconds(self, step: StepTokens) -> float: ...

    def of_read(self, num_tokens: int) -> float: ...


class SimulatedCosts(msgspec.Struct, frozen=True):
    """Costs in seconds. The defaults describe an 8B model in bf16 on an H200 that reads KV over NVLink.

    A step takes ``step`` + ``decode`` per decoding sequence + ``decode_context`` per token of their contexts. Prompts
    add ``prompt_token`` per token or draft + ``prompt_context`` per pair of a token and one that it attends to. The
    read of the weights hides 23 % of that, at most ``hidden``. A read takes ``read`` + ``read_token`` per token of its
    blocks, a copy from or to host memory ``host_token`` per token: 50 GB/s. So decoding 1, 32, 128 and 256 sequences
    with short contexts takes 4.8, 5.4, 7.4 and 9.9 ms per step, a prompt of 512, 2,048 and 8,192 tokens 14, 48 and
    201 ms, and reading the last one 6.7 ms.
    """

    step: float = 4.8e-3
    prompt_token: float = 22.5e-6
    decode: float = 20e-6
    read: float = 1e-3
    read_token: float = 0.7e-6
    hidden: float = 3.6e-3
    prompt_context: float = 0.45e-9
    decode_context: float = 34.5e-9
    host_token: float = 2.6e-6

    def seconds(self, step: StepTokens) -> float:
        """Return the seconds of a step; 0 for an empty one."""
        if not (step.decodes or step.prompt_tokens):
            return 0.0
        prompts = step.prompt_tokens * self.prompt_token + step.prompt_context * self.prompt_context
        decodes = step.decodes * self.decode + step.decode_context * self.decode_context
        return self.step + decodes + prompts - min(self.hidden, _HIDDEN_SHARE * prompts)

    def of_read(self, num_tokens: int) -> float:
        return self.read + num_tokens * self.read_token

    def of_host_copy(self, num_tokens: float) -> float:
        return num_tokens * self.host_token

    def __str__(self) -> str:
        """Return the text that ``--sim-costs`` accepts."""
        return ",".join(f"{_flag(name)}={getattr(self, name):g}" for name in self.__struct_fields__)


class SimulatedSteps:
    """The seconds of a node's steps, from their plans in order."""

    def __init__(
        self, costs: StepSeconds, accepted: ImageInput | None = None, image_token_cost: EncodingCost | None = None
    ) -> None:
        """``accepted`` and ``image_token_cost`` are those of NodeConfig; without them no image is encoded."""
        self._costs = costs
        self._accepted = accepted
        self._image_token_cost = image_token_cost or EncodingCost()
        self._tokens: dict[int, int] = {}  # tokens with KV, by sequence

    def seconds(self, plan: StepPlan) -> float:
        """Return the seconds of the next step."""
        return self._costs.seconds(self._add(plan))

    def _add(self, plan: StepPlan) -> StepTokens:
        tokens = self._tokens
        for seq in plan.finished:
            tokens.pop(seq, None)
        for new in plan.new:
            tokens[new.seq] = new.num_computed
        decode_context = 0
        for item in plan.scheduled[: plan.num_decodes]:  # assume that no draft is accepted
            tokens[item.seq] = context = tokens.get(item.seq, 0) + 1
            decode_context += context
        prompt_tokens = plan.num_drafts
        prompt_context = 0.0
        for item in plan.prompts:
            count = item.num_tokens
            prompt_tokens += count
            context = tokens.get(item.seq, 0)
            prompt_context += count * (context + count / 2)
            tokens[item.seq] = context + count
        return StepTokens(plan.num_decodes, decode_context, prompt_tokens + self._image_work(plan), prompt_context)

    def _image_work(self, plan: StepPlan) -> int:
        if self._accepted is None:
            return 0
        cell = self._accepted.cell**2
        cost = self._image_token_cost
        return sum(
            cost.work(image.height * image.width // cell, image.first, image.last, image.depth) for image in plan.images
        )


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
