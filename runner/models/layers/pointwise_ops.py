"""The small operations between matrix products, in plain torch. ``triton_ops.py`` has them as Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.batch import Activations
from runner.distributed.parallel_state import ParallelState
from runner.kernels.reference import gated_rms_norm, grouped_gated_norm, rms_norm, sigmoid_and_mul, silu_and_mul


class PointwiseOps:
    """Tensors are [tokens, size]. Norms are RMS norms with the model's epsilon, computed in float32."""

    def __init__(self, eps: float, parallel: ParallelState) -> None:
        self._eps = eps
        self._parallel = parallel
        self._device_eps = torch.tensor(eps, device=parallel.device)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Norm x and scale it by weight [size]."""
        return rms_norm(x, weight, self._device_eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        """Add the sum of x over all tensor shards to ``residual`` in place; norm the rounded sum. x may be overwritten.

        The result is scaled by weight [size].
        """
        return rms_norm(residual.add_(self._parallel.all_reduce(x)), weight, self._device_eps)

    def quantized_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, group: int) -> Activations:
        """Do ``add_rms_norm``, or ``rms_norm`` without a residual, and quantize with a scale per ``group`` values.

        A norm that an all-reduce computes is returned as it is. Products quantize it themselves.
        """
        raise NotImplementedError("no product takes quantized activations without Triton")

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, [tokens, size], from both side by side, [tokens, 2 * size]."""
        return silu_and_mul(gate_up)

    def sigmoid_and_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        """Return sigmoid(gate) * x, [tokens, size]; gate [tokens, size] or [tokens, 1], with rows at any stride."""
        return sigmoid_and_mul(gate, x)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """Norm heads x [tokens, heads, size], scale them by weight [size], and multiply them by silu(gate).

        gate [tokens, heads * size], with rows at any stride → [tokens, heads * size].
        """
        return gated_rms_norm(x, gate, weight, self._device_eps)

    def grouped_gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, gate_first: bool
    ) -> Tensor:
        """Multiply x [tokens, size] by silu(gate), and norm each of its groups; scaled by weight [size].

        The norm comes before the product unless ``gate_first``; without a weight there is none. gate: at any stride.
        """
        return grouped_gated_norm(x, gate, weight, groups, gate_first, self._eps)
