"""The device memory of adapters: a slot holds one adapter's A and B of every linear layer of a rank.

    memory [slots, values of a slot]        a slot is one run of memory, so that it is cleared whole
    layer  A [projections · max_rank, in_features] │ B of one projection after the other [max_rank, its outputs]

B is transposed, so that the first rows of A and B are all that an adapter of lower rank has. ``ranks`` says how many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.adapters.adapter import AdapterLimits
from runner.batch import AdapterTiles
from runner.models.adapters.token_slots import TokenSlots
from runner.pinned_memory import copied
from runner.placement import TensorPlacement

_ALIGNED = 8  # values: 16 bytes of a 16-bit dtype, one load of a thread


class LowRankPart(NamedTuple):
    """A rank's part of an adapter's change of one projection, in host memory. B contains the scaling."""

    linear: int
    member: int
    a: Tensor  # [rank, in_features]
    b: Tensor  # [rank, outputs]: B transposed


class LayerSlots:
    """The A and B of one linear layer in all slots."""

    def __init__(self, number: int, in_features: int, outputs: Sequence[int], max_rank: int, first_member: int) -> None:
        """``outputs`` counts the outputs of each projection."""
        self.number = number
        self.in_features = in_features
        self.outputs = tuple(outputs)
        self.max_rank = max_rank
        self.first_member = first_member  # number of its first projection among all of the rank
        self.begins = tuple(accumulate(outputs, initial=0))  # first output of each projection, and the end
        self.num_values = max_rank * (len(outputs) * in_features + sum(outputs))
        self.tokens: TokenSlots
        self.a: Tensor  # [slots, projections · max_rank · in_features]
        self.b: Tensor  # [slots, max_rank · outputs of all projections]
        self.ranks: Tensor  # [slots, projections] int32
        self.host_ranks: NDArray[np.int32]  # [slots, projections]
        self.kernels: Callable[[Tensor, Tensor, AdapterTiles], None] | None = None  # None: plain torch

    def part(self, slot: int, member: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return A [rank, in_features] and B transposed [rank, outputs] of a projection in a slot."""
        first = member * self.max_rank * self.in_features
        a = self.a[slot, first : first + rank * self.in_features]
        size = self.outputs[member]
        begin = self.begins[member] * self.max_rank
        return a.view(rank, self.in_features), self.b[slot, begin : begin + rank * size].view(rank, size)

    def add_delta(self, x: Tensor, y: Tensor) -> None:
        """Add the deltas of the step's tokens to y [tokens, outputs] of x [tokens, in_features]."""
        if self.kernels is not None:
            self.kernels(x, y, self.tokens.tiles(len(x)))
            return
        for slot, tokens in self.tokens.segments(len(x)):
            ranks = self.host_ranks[slot].tolist()
            if not any(ranks):
                continue
            of_slot = x.index_select(0, tokens)
            for member, rank in enumerate(ranks):
                if rank:
                    a, b = (values.to(x.dtype) for values in self.part(slot, member, rank))
                    columns = y[:, self.begins[member] : self.begins[member + 1]]
                    columns.index_add_(0, tokens, (of_slot @ a.t()) @ b)


def _kernels(layer: LayerSlots) -> Callable[[Tensor, Tensor, AdapterTiles], None]:
    """Return Triton's ``add_delta`` of a layer; Triton is imported only where it is used."""
    from runner.kernels.products.low_rank import LowRankWeights, add_delta, output_blocks

    blocks = output_blocks(layer.begins, layer.a.device)
    weights = LowRankWeights(layer.a, layer.b, layer.ranks, blocks, layer.max_rank, layer.in_features)
    return partial(add_delta, weights)


class AdapterSlots:
    """All slots of a rank. Layers are added while the model is built; ``allocate`` follows."""

    def __init__(self, limits: AdapterLimits, placement: TensorPlacement, max_tokens: int) -> None:
        """``max_tokens`` counts the tokens of a step."""
        self.limits = limits
        self.placement = placement
        self.tokens = TokenSlots(max_tokens, limits.max_loras, placement.device, placement.use_triton)
        self.layers: list[LayerSlots] = []
        self._memory = torch.empty(0)
        self._ranks = torch.empty(0)
        self._host_ranks = np.zeros((0, 0), dtype=np.int32)
        self._num_members = 0

    def add(self, in_features: int, outputs: Sequence[int]) -> LayerSlots:
        """Add a linear layer, by its inputs and the outputs of its projections on this rank."""
        layer = LayerSlots(len(self.layers), in_features, outputs, self.limits.max_lora_rank, self._num_members)
        self._num_members += len(outputs)
        self.layers.append(layer)
        return layer

    @property
    def num_bytes(self) -> int:
        return self._memory.numel() * self._memory.element_size()

    def allocate(self) -> None:
        """Allocate all slots, empty."""
        slots = self.limits.max_loras
        device = self.placement.device
        ends = [0, *accumulate(-(-layer.num_values // _ALIGNED) * _ALIGNED for layer in self.layers)]
        self._memory = torch.zeros(slots, ends[-1], dtype=self.placement.stored, device=device)
        self._ranks = torch.zeros(slots, self._num_members, dtype=torch.int32, device=device)
        self._host_ranks = np.zeros((slots, self._num_members), dtype=np.int32)
        for layer, begin in zip(self.layers, ends[:-1], strict=True):
            of_a = len(layer.outputs) * layer.max_rank * layer.in_features
            members = slice(layer.first_member, layer.first_member + len(layer.outputs))
            layer.tokens = self.tokens
            layer.a = self._memory[:, begin : begin + of_a]
            layer.b = self._memory[:, begin + of_a : begin + layer.num_values]
            layer.ranks = self._ranks[:, members]
            layer.host_ranks = self._host_ranks[:, members]
            if self.placement.use_triton:
                layer.kernels = _kernels(layer)

    def write(self, slot: int, parts: Sequence[LowRankPart]) -> None:
        """Overwrite a slot whole, behind all work that is launched already. The host does not wait."""
        assert 0 <= slot < self.limits.max_loras, f"slot {slot} of {self.limits.max_loras}"
        ranks = np.zeros(self._num_members, dtype=np.int32)
        self._memory[slot].zero_()
        for part in parts:
            layer = self.layers[part.linear]
            rank = len(part.a)
            a, b = layer.part(slot, part.member, rank)
            a.copy_(part.a, non_blocking=True)
            b.copy_(part.b, non_blocking=True)
            ranks[layer.first_member + part.member] = rank
        self._host_ranks[slot] = ranks
        self._ranks[slot].copy_(copied(ranks, self.placement.device))
