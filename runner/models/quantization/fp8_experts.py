"""Experts whose FP8 weights (E4M3) stay in FP8 in memory, with a scale per output or per block.

GPUs of compute capability 9.0 or later quantize the activations of sorted tokens, as ``fp8.py`` does. Few tokens are
not sorted, and their activations stay as they are. Without Triton an expert is dequantized for each use.
"""

from __future__ import annotations

from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.model.quantization.kept_weights import fp8_blocks
from runner.batch import Routing, SharedGate
from runner.kernels.experts.expert_reference import sum_of_experts
from runner.models.layers.weight_shard import ShardRange, WeightShard, WeightShards
from runner.models.quantization import ExpertsMethod, ExpertsShard, GatedActivation, LayerOptions
from runner.models.quantization.fp8 import E4M3, computes_in_fp8
from runner.placement import TensorPlacement


class Fp8Experts(ExpertsMethod):
    """Grouped products on GPUs; on CPUs one product per expert."""

    def __init__(
        self,
        shard: ExpertsShard,
        activation: GatedActivation,
        placement: TensorPlacement,
        options: LayerOptions | None = None,
    ) -> None:
        self._shard = shard
        self._activation = activation
        self._use_triton = placement.use_triton
        num_experts = len(shard.local)
        inner = shard.inner
        hidden_size = shard.hidden_size
        rows, group = fp8_blocks(options or {})
        assert not group or inner.start % group == 0, "kept_problem refuses it"
        cut = gcd(rows, inner.start, inner.size)
        self._gate_up = Fp8Stack((num_experts, 2 * inner.size, hidden_size), cut, group, placement)
        self._down = Fp8Stack((num_experts, hidden_size, inner.size), rows, group, placement)

    def weight_shards(self) -> WeightShards:
        hidden = ShardRange.full(self._shard.hidden_size)
        inner = self._shard.inner
        for index, expert in enumerate(self._shard.local):
            yield from self._gate_up.shards(f"{expert}.gate_proj", index, 0, inner, hidden)
            yield from self._gate_up.shards(f"{expert}.up_proj", index, inner.size, inner, hidden)
            yield from self._down.shards(f"{expert}.down_proj", index, 0, hidden, inner)

    def process_weights_after_loading(self) -> None:
        self._gate_up.process()
        self._down.process()

    def apply(
        self, x: Tensor, routing: Routing, shared: Tensor | None = None, gate: SharedGate | None = None
    ) -> Tensor:
        local = self._shard.local
        if not self._use_triton:
            return sum_of_experts(x, routing, local, self._expert, shared, gate)
        from runner.kernels.experts.grouped_fp8 import MOST_ROWS, grouped_fp8
        from runner.kernels.experts.grouped_gemm import sum_experts
        from runner.kernels.experts.grouped_tiles import group_rows
        from runner.kernels.products.fp8_products import quantize

        rows = group_rows(routing.experts, local, most=MOST_ROWS)
        gate_up = self._gate_up
        down = self._down
        is_sorted = rows.tokens is not None
        inputs = quantize(x, gate_up.group) if is_sorted and gate_up.in_fp8 else x
        gates = grouped_fp8(inputs, *gate_up.operands, rows)
        quantizes = is_sorted and down.in_fp8 and self._activation.is_silu
        inner = quantize(gates, down.group, gated=True) if quantizes else self._activation(gates)
        return sum_experts(grouped_fp8(inner, *down.operands, rows), routing, local, shared, gate)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        index = number - self._shard.local.start
        inner = self._activation(F.linear(x, self._gate_up.dequantized(index, x.dtype)))
        return F.linear(inner, self._down.dequantized(index, x.dtype))


class Fp8Stack:
    """``weight`` [experts, outputs, inputs] E4M3; ``scales`` [experts, row blocks, groups of inputs] float32."""

    def __init__(self, shape: tuple[int, int, int], row_block: int, group: int, placement: TensorPlacement) -> None:
        """``row_block`` outputs share a scale, and ``group`` inputs; 0: all inputs."""
        experts, outputs, inputs = shape
        self._row_block = row_block
        self.group = group or inputs
        self._has_blocks = group > 0
        self.weight = torch.empty(shape, device=placement.device, dtype=E4M3)
        groups = -(-inputs // self.group)
        self._rows = torch.empty(experts, outputs, groups, device=placement.device, dtype=torch.float32)
        self.scales: Tensor | None = None
        self.in_fp8 = computes_in_fp8(self.weight[0], self.group if group else 0, placement)

    @property
    def operands(self) -> tuple[Tensor, Tensor, int, int]:
        """Weight, scales, and the outputs and inputs that share a scale."""
        assert self.scales is not None
        return self.weight, self.scales, self._row_block, self.group

    def shards(self, name: str, index: int, first: int, outputs: ShardRange, inputs: ShardRange) -> WeightShards:
        """Yield one expert's projection, whose memory begins at row ``first``; a row of scales per output."""
        rows = slice(first, first + outputs.size)
        dim, start = (0, outputs.start) if inputs.size == inputs.full_size else (1, inputs.start)
        full_shape = outputs.full_size, inputs.full_size
        yield f"{name}.weight", WeightShard(self.weight[index, rows], full_shape, dim, start)
        full_shape = outputs.full_size, -(-inputs.full_size // self.group) if self._has_blocks else 1
        dim, start = (1, start // self.group) if dim and self._has_blocks else (0, outputs.start)
        memory = self._rows[index, rows]
        yield f"{name}.weight_scale", WeightShard(memory, full_shape, dim, start, restore=self.restore)

    def process(self) -> None:
        """Keep a row of scales for each block of outputs, always at the same address: captured graphs read it."""
        kept = self._rows[:, :: self._row_block]
        if self.scales is None:
            self.scales = kept.contiguous()
        else:
            self.scales.copy_(kept)
        self._rows = self.scales if self._row_block == 1 else self._rows.to("meta")

    def restore(self) -> None:
        """Undo ``process``."""
        if self._rows.is_meta:
            assert self.scales is not None
            self._rows = self.scales.repeat_interleave(self._row_block, 1)[:, : self.weight.shape[1]].contiguous()

    def dequantized(self, index: int, dtype: torch.dtype) -> Tensor:
        """Return one expert's weight [outputs, inputs] in ``dtype``, rounded once from float32."""
        assert self.scales is not None
        outputs, inputs = self.weight.shape[1:]
        scales = self.scales[index].repeat_interleave(self._row_block, 0)[:outputs]
        return (self.weight[index].float() * scales.repeat_interleave(self.group, 1)[:, :inputs]).to(dtype)
