"""FP8 weights (E4M3) that stay in FP8 in memory, with a scale per output or per block of outputs and inputs.

A GPU of compute capability 9.0 or later multiplies them with activations that are quantized on the way: a scale per
token beside scales per output, a scale per token and group of inputs beside blocks. One token is multiplied without
quantizing it, because its time is the time to read the weight. Elsewhere, and for other dtypes than bfloat16, a weight
is dequantized for each use: exact, and slow.
"""

from __future__ import annotations

from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.model.quantization.kept_weights import fp8_blocks
from runner.batch import Quantized
from runner.models.layers.weight_shard import ShardRange, WeightShard, WeightShards, row_runs
from runner.models.quantization import GatedActivation, LayerOptions, LinearMethod
from runner.placement import TensorPlacement

E4M3 = torch.float8_e4m3fn
_FASTEST_LEAST = (9, 0)  # compute capability with products of FP8 whose rows and columns have scales
_ALIGNED = 16  # inputs and outputs that torch._scaled_mm takes


class Fp8LinearMethod(LinearMethod):
    """``weight`` [out_features, in_features] E4M3; ``scales`` [row blocks, groups of inputs] float32."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        placement: TensorPlacement,
        options: LayerOptions | None = None,
    ) -> None:
        self._row_block, group = fp8_blocks(options or {})
        self._group = group or in_features  # inputs that share a scale
        self.weight = torch.empty(out_features, in_features, device=placement.device, dtype=E4M3)
        self.bias = torch.empty(out_features, device=placement.device, dtype=placement.dtype) if bias else None
        self.scales = self._row_scales()
        self._rows = self.scales  # a row of scales per output, to be filled
        self._placement = placement
        self._has_blocks = group > 0
        self._products: Fp8Products | None = None

    def weight_shards(
        self, first_output: int, outputs: ShardRange, inputs: ShardRange, rows: Tensor | None = None
    ) -> WeightShards:
        """Scales are filled a row per output, because projections and shards may begin within a block of outputs."""
        assert inputs.start % self._group == 0, "kept_problem refuses it"
        self._row_block = gcd(self._row_block, first_output, outputs.start, outputs.size)
        for run in [] if rows is None else row_runs(rows):
            self._row_block = gcd(self._row_block, *run)
        mine = slice(first_output, first_output + outputs.size)
        dim, start = (0, outputs.start) if inputs.size == inputs.full_size else (1, inputs.start)
        yield "weight", WeightShard(self.weight[mine], (outputs.full_size, inputs.full_size), dim, start, rows=rows)
        full = outputs.full_size, -(-inputs.full_size // self._group) if self._has_blocks else 1
        dim, start = (1, start // self._group) if dim and self._has_blocks else (0, outputs.start)
        yield "weight_scale", WeightShard(self._rows[mine], full, dim, start, rows=rows, restore=self.restore_weights)
        if self.bias is not None:
            yield "bias", WeightShard(self.bias[mine], (outputs.full_size,), 0, outputs.start, rows=rows)

    def process_weights_after_loading(self) -> None:
        """Keep a row of scales for each block of outputs; choose the products of this device."""
        kept = self._rows[:: self._row_block].contiguous()
        if self._products is not None:
            self._products.scales.copy_(kept)  # captured graphs read it
        else:
            self.scales = kept
        self._rows = self.scales if self._row_block == 1 else self._rows.to("meta")
        group = self._group if self._has_blocks else 0
        if self._products is None and computes_in_fp8(self.weight, group, self._placement):
            self._products = Fp8Products(self.weight, self.scales, self._row_block, self._group)

    def restore_weights(self) -> None:
        if self._rows.is_meta:
            self._rows = self.scales.repeat_interleave(self._row_block, 0)[: len(self.weight)]

    def apply(self, x: Tensor) -> Tensor:
        if self._products is None:
            return F.linear(x, self.dequantized(x.dtype), self.bias)
        return self._add_bias(self._products(x))

    def quantized_group(self, tokens: int) -> int:
        return self._group if self._products is not None and tokens > 1 else 0

    def apply_quantized(self, x: Quantized) -> Tensor:
        assert self._products is not None
        return self._add_bias(self._products.of_quantized(x))

    def apply_gated(self, gate_up: Tensor, activation: GatedActivation) -> Tensor:
        if self._products is None or gate_up.shape[0] == 1 or not activation.is_silu:
            return super().apply_gated(gate_up, activation)
        return self._add_bias(self._products.of_gated(gate_up))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out_features, in_features] in ``dtype``, rounded once from float32."""
        out_features, in_features = self.weight.shape
        scales = self.scales.repeat_interleave(out_features // len(self.scales), 0)
        scales = scales.repeat_interleave(self._group, 1)[:, :in_features]
        return self.weight.float().mul_(scales).to(dtype)

    def _add_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y.add_(self.bias)

    def _row_scales(self) -> Tensor:
        out_features, in_features = self.weight.shape
        shape = out_features, -(-in_features // self._group)
        return torch.empty(shape, device=self.weight.device, dtype=torch.float32)


def computes_in_fp8(weight: Tensor, group: int, placement: TensorPlacement) -> bool:
    """Whether Hopper's products take a weight [outputs, inputs] with scales per ``group`` inputs; 0: for all."""
    device = weight.device
    if not placement.use_triton or device.type != "cuda" or placement.dtype != torch.bfloat16:
        return False
    groups_fit = not group or (group in (64, 128) and weight.shape[1] % group == 0)
    aligned = all(size % _ALIGNED == 0 for size in weight.shape)
    return aligned and groups_fit and torch.cuda.get_device_capability(device) >= _FASTEST_LEAST


class Fp8Products:
    """x Wᵀ in bfloat16 on Hopper and later; Triton is imported with the first of them."""

    def __init__(self, weight: Tensor, scales: Tensor, row_block: int, group: int) -> None:
        from runner.kernels.products import fp8_products
        from runner.kernels.products.fp8_few_tokens import FewTokens

        self.scales = scales
        self.few = FewTokens(weight, scales, row_block, group)
        self._kernels = fp8_products
        self._weight = weight
        self._row_block = row_block
        self._group = group
        self._per_output = scales.shape == (weight.shape[0], 1)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [tokens, out_features] of x [tokens, in_features], both bfloat16."""
        if x.shape[0] == 1:
            return self._kernels.gemv(x, self._weight, self.scales, self._row_block, self._group)
        return self.of_quantized(self._kernels.quantize(x, self._group))

    def of_gated(self, gate_up: Tensor) -> Tensor:
        """Return [tokens, out_features] of silu(gate) * up; gate_up is [tokens, 2 * in_features]."""
        return self.of_quantized(self._kernels.quantize(gate_up, self._group, gated=True))

    def of_quantized(self, x: Quantized) -> Tensor:
        """Return [tokens, out_features] of x [tokens, in_features], in the groups of the weight's inputs."""
        if len(x.values) <= self.few.most_tokens:
            return self.few(x)
        values, scales = x
        if not self._per_output:
            return self._kernels.block_matmul(values, scales, self._weight, self.scales, self._row_block, self._group)
        y: Tensor = torch._scaled_mm(
            values,
            self._weight.t(),
            scale_a=scales,
            scale_b=self.scales.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,  # as vLLM's products; the activations' rounding errs more
        )
        return y
