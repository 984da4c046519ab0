"""The costs of a virtual node: steps, reads and messages. docs/constants.md has their origin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pdserve.config.simulated_costs import SimulatedCosts, StepSeconds


class Card(NamedTuple):
    """The device of a node with a model."""

    costs: StepSeconds
    idle_step: float  # seconds of a decode step of one sequence: kernels for a single row; 0: not measured at start
    kv_tokens: int  # room for KV


#: An 8B model in bf16 that reads KV over NVLink.
H100_COSTS = SimulatedCosts(
    step=6.2e-3,
    decode=11e-6,
    decode_context=43.6e-9,
    prompt_token=22.5e-6,
    prompt_context=0.45e-9,
    hidden=3.9e-3,
)
H100 = Card(H100_COSTS, idle_step=5.4e-3, kv_tokens=444_848)


@dataclass(frozen=True)
class Delays:
    """Seconds beside steps and reads; a node's frontend counts as a part of the node."""

    request: float = 4e-3  # from the client to the node that decodes
    message: float = 1e-3  # from node to node; two of them delay the first token
    confirm: float = 2.5e-3  # D's processes, first token to confirmed KV; 6 ms with a read and two messages


MEASURED_DELAYS = Delays()
