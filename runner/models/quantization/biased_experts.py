"""gpt-oss's experts: stacked in the checkpoint, with biases and a clamped SwiGLU; gates and ups alternate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.model.moe import MoEConfig
from runner.batch import Routing, SharedGate
from runner.kernels.experts.expert_reference import sum_of_experts
from runner.kernels.reference import clamped_swiglu
from runner.models.layers.weight_shard import ShardRange, WeightShard, WeightShards
from runner.models.quantization import ExpertsMethod, ExpertsShard
from runner.models.quantization.mxfp4 import Mxfp4Stack
from runner.placement import TensorPlacement

if TYPE_CHECKING:
    from runner.kernels.experts.grouped_tiles import GroupedRows  # it imports Triton


class PlainStack:
    """Unquantized. Memory has each expert's outputs first, for the grouped products; checkpoints have inputs first."""

    def __init__(self, shape: tuple[int, int, int], placement: TensorPlacement, gated: bool = False) -> None:
        """``shape``: experts, outputs, inputs. If ``gated``, outputs are gates and ups."""
        self._weight = torch.empty(shape, device=placement.device, dtype=placement.stored)

    def weight_shards(self, name: str, experts: ShardRange, outputs: ShardRange, inputs: ShardRange) -> WeightShards:
        yield name, WeightShard.of_ranges(self._weight.transpose(1, 2), (experts, inputs, outputs))

    def process_weights_after_loading(self) -> None:
        """Nothing: the grouped products read the checkpoint's numbers."""

    def rows_of_experts(self, experts: Tensor, local: range) -> GroupedRows:
        from runner.kernels.experts.grouped_tiles import group_rows

        return group_rows(experts, local)

    def product(self, x: Tensor, bias: Tensor, rows: GroupedRows) -> Tensor:
        from runner.kernels.experts.grouped_gemm import grouped_gemm

        return grouped_gemm(x, self._weight, rows, bias)

    def activations(self, x: Tensor, bias: Tensor, rows: GroupedRows, alpha: float, limit: float) -> Tensor:
        from runner.kernels.activation import clamped_swiglu

        return clamped_swiglu(self.product(x, bias, rows), alpha, limit)

    def expert(self, index: int, dtype: torch.dtype) -> Tensor:
        return self._weight[index].to(dtype)


class BiasedExperts(ExpertsMethod):
    """Weights are unquantized, or stay in MXFP4. On GPUs grouped products; on CPUs one product per expert."""

    def __init__(self, shard: ExpertsShard, moe: MoEConfig, placement: TensorPlacement, mxfp4: bool) -> None:
        assert moe.swiglu_limit is not None
        self._shard = shard
        self._use_triton = placement.use_triton
        self._alpha = moe.swiglu_alpha
        self._limit = moe.swiglu_limit
        num_experts = len(shard.local)
        inner = shard.inner.size
        hidden_size = shard.hidden_size
        stack = Mxfp4Stack if mxfp4 else PlainStack
        self._gate_up = stack((num_experts, 2 * inner, hidden_size), placement, gated=True)
        self._down = stack((num_experts, hidden_size, inner), placement)
        place: dict[str, Any] = {"device": placement.device, "dtype": placement.stored}
        self._gate_up_bias = torch.empty(num_experts, 2 * inner, **place)
        self._down_bias = torch.empty(num_experts, hidden_size, **place)

    def weight_shards(self) -> WeightShards:
        """Yield parts of stacked tensors: some experts, or a part of each."""
        local, num_experts, hidden_size, inner = self._shard
        experts = ShardRange(local.start, len(local), num_experts)
        hidden = ShardRange.full(hidden_size)
        gate_ups = ShardRange(*(2 * size for size in inner))
        yield from self._gate_up.weight_shards("gate_up_proj", experts, gate_ups, hidden)
        yield "gate_up_proj_bias", WeightShard.of_ranges(self._gate_up_bias, (experts, gate_ups))
        yield from self._down.weight_shards("down_proj", experts, hidden, inner)
        yield "down_proj_bias", WeightShard.of_ranges(self._down_bias, (experts, hidden))

    def process_weights_after_loading(self) -> None:
        """Leave the bias of down to the first shard, because the shards' results are summed."""
        self._gate_up.process_weights_after_loading()
        self._down.process_weights_after_loading()
        if self._shard.inner.start:
            self._down_bias.zero_()

    def apply(
        self, x: Tensor, routing: Routing, shared: Tensor | None = None, gate: SharedGate | None = None
    ) -> Tensor:
        local = self._shard.local
        if not self._use_triton:
            return sum_of_experts(x, routing, local, self._expert, shared, gate)
        from runner.kernels.experts.grouped_gemm import sum_experts

        rows = self._gate_up.rows_of_experts(routing.experts, local)
        inner = self._gate_up.activations(x, self._gate_up_bias, rows, self._alpha, self._limit)
        return sum_experts(self._down.product(inner, self._down_bias, rows), routing, local, shared, gate)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        index = number - self._shard.local.start
        dtype = x.dtype
        gate_up = F.linear(x, self._gate_up.expert(index, dtype), self._gate_up_bias[index].to(dtype))
        inner = clamped_swiglu(gate_up, self._alpha, self._limit)
        return F.linear(inner, self._down.expert(index, dtype), self._down_bias[index].to(dtype))
