"""The operations between matrix products as Triton kernels."""

from __future__ import annotations

from torch import Tensor

from runner.distributed.parallel_state import ParallelState
from runner.kernels.activation import silu_mul
from runner.kernels.norm import add_rms_norm, rms_norm


class TritonOps:
    """Implements runner.models.layers.pointwise_ops.Ops."""

    def __init__(self, eps: float, world: ParallelState) -> None:
        self._eps, self._world = eps, world

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        kernel = self._world.kernel
        if kernel is not None and kernel.takes(x):
            return kernel(x, residual, weight, self._eps)
        return add_rms_norm(self._world.all_reduce(x), residual, weight, self._eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)
