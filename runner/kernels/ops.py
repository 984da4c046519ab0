"""The operations between matrix products as Triton kernels."""

from __future__ import annotations

from torch import Tensor

from runner.kernels.activation import silu_mul
from runner.kernels.norm import add_rms_norm, rms_norm


class TritonOps:
    """Implements runner.models.ops.Ops."""

    def __init__(self, eps: float) -> None:
        self._eps = eps

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return add_rms_norm(x, residual, weight, self._eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)
