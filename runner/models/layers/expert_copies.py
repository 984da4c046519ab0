"""Copies of hot experts on further shards: tokens are spread over the copies of their experts, and counted.

    experts 0 1 2 3 of two shards, each with one slot for a copy:    shard 0: 0 1 [2]    shard 1: 2 3 [0]
    the slots are numbered                                                    0 1  2              3 4  5

A copy has the same weights, so it does not matter which one computes a token, but for the order of the sum. Maps and
counts are on the device and change in place: CUDA graphs that read them stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pdserve.config.parallel import RankPosition
from runner.batch import Routing
from runner.kernels import expert_reference
from runner.models.layers.expert_placement import UNUSED, Placement, first_placement
from runner.placement import TensorPlacement


class ExpertCopies:
    """The slots of all shards for one layer."""

    def __init__(self, num_experts: int, position: RankPosition, placement: TensorPlacement) -> None:
        parallel = position.parallel
        self._shard, self._own = position.shard, num_experts // parallel.ep
        self._each = self._own + parallel.ep_redundancy
        self.placement = first_placement(num_experts, parallel.ep, parallel.ep_redundancy)
        self.mine = list(self.placement[self._shard])  # experts in this rank's slots for copies; changed in place
        device = placement.device
        self.load = torch.zeros(num_experts, dtype=torch.int64, device=device)  # tokens of each expert
        self._slots = torch.zeros(num_experts, parallel.ep, dtype=torch.int32, device=device)  # of each expert
        self._counts = torch.ones(num_experts, dtype=torch.int32, device=device)  # slots of each expert
        self._spread: Callable[..., Tensor] = expert_reference.spread_over_slots
        if placement.use_triton:  # Triton is imported only where it is used
            from runner.kernels.routing import spread_over_slots

            self._spread = spread_over_slots
        self.place(self.placement)

    @property
    def local(self) -> range:
        """The slots of this rank."""
        return range(self._shard * self._each, (self._shard + 1) * self._each)

    def __call__(self, routing: Routing) -> Routing:
        """Return the slots for the experts of each token, and count these. Token t takes copy t % copies."""
        return Routing(routing.weights, self._spread(routing.experts, self._slots, self._counts, self.load))

    def moves(self, placement: Placement) -> Iterator[tuple[int, int, int, int]]:
        """Yield what must be copied first: source shard and row there, target shard and row there."""
        for shard, (old, new) in enumerate(zip(self.placement, placement, strict=True)):
            for slot, (before, expert) in enumerate(zip(old, new, strict=True)):
                if expert not in (before, UNUSED):
                    yield *divmod(expert, self._own), shard, self._own + slot

    def place(self, placement: Placement) -> None:
        """Spread tokens over these copies from the next step on. Their weights must be in the slots."""
        slots = [[expert // self._own * self._each + expert % self._own] for expert in range(len(self._slots))]
        for shard, experts in enumerate(placement):
            for slot, expert in enumerate(experts):
                if expert != UNUSED:
                    slots[expert].append(shard * self._each + self._own + slot)
        width = self._slots.shape[1]
        self._slots.copy_(torch.tensor([row + [0] * (width - len(row)) for row in slots], dtype=torch.int32))
        self._counts.copy_(torch.tensor([len(row) for row in slots], dtype=torch.int32))
        self.placement, self.mine[:] = placement, placement[self._shard]
