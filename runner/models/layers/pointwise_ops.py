"""The small operations between matrix products, in plain torch. ``triton_ops.py`` has them as Triton kernels."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from runner.distributed.parallel_state import ParallelState
from runner.kernels.reference import rms_norm, silu_and_mul
from runner.placement import TensorPlacement


class PointwiseOps(Protocol):
    """Tensors are [tokens, size]. Norms are RMS norms with the model's epsilon, computed in float32."""

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Norm x and scale it by weight [size]."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        """Add the sum of x over all tensor shards to ``residual`` in place; norm the rounded sum. x may be overwritten.

        The result is scaled by weight [size].
        """

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, [tokens, size], from both side by side, [tokens, 2 * size]."""


def build_pointwise_ops(eps: float, parallel: ParallelState, placement: TensorPlacement) -> PointwiseOps:
    """Choose the form for a model. Triton is imported only where it is used."""
    if not placement.use_triton:
        return TorchPointwiseOps(eps, parallel, placement.device)
    from runner.models.layers.triton_ops import TritonPointwiseOps

    return TritonPointwiseOps(eps, parallel)


class TorchPointwiseOps:
    """Implements PointwiseOps on any device."""

    def __init__(self, eps: float, parallel: ParallelState, device: torch.device) -> None:
        self._parallel = parallel
        self._eps = torch.tensor(eps, device=device)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(residual.add_(self._parallel.all_reduce(x)), weight, self._eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul(gate_up)
