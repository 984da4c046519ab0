"""The operations between matrix products as Triton kernels."""

from __future__ import annotations

from torch import Tensor

from runner.batch import Activations
from runner.kernels.activation import sigmoid_and_mul, silu_and_mul
from runner.kernels.norm import add_rms_norm, gated_rms_norm, grouped_gated_norm, quantized_rms_norm, rms_norm
from runner.models.layers.pointwise_ops import PointwiseOps


class TritonPointwiseOps(PointwiseOps):
    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        kernel = self._parallel.fused_all_reduce
        if kernel is not None and weight.dtype == x.dtype and kernel.takes(x):
            return kernel(x, residual, weight, self._eps)
        return add_rms_norm(self._parallel.all_reduce(x), residual, weight, self._eps)

    def quantized_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, group: int) -> Activations:
        if residual is not None:
            kernel = self._parallel.fused_all_reduce
            if kernel is not None and weight.dtype == x.dtype and kernel.takes(x):
                return self.add_rms_norm(x, residual, weight)
            x = self._parallel.all_reduce(x)
        return quantized_rms_norm(x, residual, weight, self._eps, group)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul(gate_up)

    def sigmoid_and_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        return sigmoid_and_mul(gate, x)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, weight, self._eps)

    def grouped_gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, gate_first: bool
    ) -> Tensor:
        return grouped_gated_norm(x, gate, weight, groups, gate_first, self._eps)
