"""The weight of an RMS norm, as the checkpoint stores it and as kernels multiply by it."""

from __future__ import annotations

import torch

from runner.models.layers.weight_shard import WeightShard
from runner.placement import TensorPlacement


class NormWeight:
    """``weight`` [size] is the stored one, or 1 + the stored one in float32: 16 bits would round its small part away.

    Both keep their addresses, which captured graphs read.
    """

    def __init__(self, size: int, placement: TensorPlacement, centered: bool = False) -> None:
        self._stored = torch.empty(size, device=placement.device, dtype=placement.dtype)
        self.weight = torch.empty_like(self._stored, dtype=torch.float32) if centered else self._stored

    def weight_shard(self) -> WeightShard:
        return WeightShard.full(self._stored)

    def process_weights_after_loading(self) -> None:
        if self.weight is not self._stored:
            torch.add(self._stored.float(), 1.0, out=self.weight)
