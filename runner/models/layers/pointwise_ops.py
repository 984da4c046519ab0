"""The small operations between matrix products: in plain torch, or as Triton kernels. Chosen once per model."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.distributed.parallel_state import ParallelState
from runner.kernels.reference import rms_norm
from runner.placement import TensorPlacement


class Ops(Protocol):
    """Tensors are [tokens, size]; norms are RMS norms with the model's epsilon, computed in float32."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """x normed and scaled by weight [size]."""

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        """Add x to ``residual`` in place; the sum, as rounded there, normed and scaled by weight [size].

        Of x each tensor shard has a part: what is added is the sum of all. x may be overwritten.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, [tokens, size], from both side by side, [tokens, 2 * size]."""


def build_ops(eps: float, world: ParallelState, place: TensorPlacement, use_triton: bool) -> Ops:
    """Triton is imported only where it is used."""
    if not use_triton:
        return TorchOps(eps, world, place)
    from runner.kernels.ops import TritonOps

    return TritonOps(eps, world)


class TorchOps:
    """Implements Ops on any device."""

    def __init__(self, eps: float, world: ParallelState, place: TensorPlacement) -> None:
        self._world = world
        self._eps = torch.tensor(eps, device=place.device)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(residual.add_(self._world.all_reduce(x)), weight, self._eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
