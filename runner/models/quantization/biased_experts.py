"""gpt-oss's experts: stacked in the checkpoint, with biases and a clamped SwiGLU; gates and ups alternate."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.config.moe import MoEConfig
from runner.batch import Routing
from runner.kernels.expert_reference import sum_of_experts
from runner.kernels.reference import clamped_swiglu
from runner.models.layers.weight_shard import WeightShard, WeightShards
from runner.models.quantization import ExpertsMethod, ExpertsShard
from runner.placement import TensorPlacement


class BiasedExperts(ExpertsMethod):
    """Unquantized. Memory has each expert's outputs first, for the grouped products; checkpoints have inputs first."""

    def __init__(self, shard: ExpertsShard, moe: MoEConfig, placement: TensorPlacement) -> None:
        assert moe.swiglu_limit is not None
        self._shard, self._use_triton = shard, placement.use_triton
        self._alpha, self._limit = moe.swiglu_alpha, moe.swiglu_limit
        num_experts, inner, hidden_size = len(shard.local), shard.inner.size, shard.hidden_size
        place: dict[str, Any] = {"device": placement.device, "dtype": placement.stored}
        self._gate_up = torch.empty(num_experts, 2 * inner, hidden_size, **place)
        self._gate_up_bias = torch.empty(num_experts, 2 * inner, **place)
        self._down = torch.empty(num_experts, hidden_size, inner, **place)
        self._down_bias = torch.empty(num_experts, hidden_size, **place)

    def weight_shards(self) -> WeightShards:
        """Yield parts of stacked tensors: some experts, or a part of each."""
        local, num_experts, hidden_size, inner = self._shard
        gate_ups = 2 * inner.full_size
        for name, memory, full, dim, start in (
            ("gate_up_proj", self._gate_up.transpose(1, 2), (hidden_size, gate_ups), 2, 2 * inner.start),
            ("gate_up_proj_bias", self._gate_up_bias, (gate_ups,), 1, 2 * inner.start),
            ("down_proj", self._down.transpose(1, 2), (inner.full_size, hidden_size), 1, inner.start),
            ("down_proj_bias", self._down_bias, (hidden_size,), 1, 0),
        ):
            whole = inner.size == inner.full_size
            yield name, WeightShard(memory, (num_experts, *full), 0 if whole else dim, local.start if whole else start)

    def process_weights_after_loading(self) -> None:
        """Leave the bias of down to the first shard, because the shards' results are summed."""
        if self._shard.inner.start:
            self._down_bias.zero_()

    def apply(self, x: Tensor, routing: Routing, shared: Tensor | None = None) -> Tensor:
        local = self._shard.local
        if not self._use_triton:
            return sum_of_experts(x, routing, local, self._expert, shared)
        from runner.kernels import activation
        from runner.kernels.grouped_gemm import group_rows, grouped_gemm, sum_experts

        rows = group_rows(routing.experts, local)
        inner = activation.clamped_swiglu(
            grouped_gemm(x, self._gate_up, rows, self._gate_up_bias), self._alpha, self._limit
        )
        return sum_experts(grouped_gemm(inner, self._down, rows, self._down_bias), routing, local, shared)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        index = number - self._shard.local.start
        weights = self._gate_up[index], self._gate_up_bias[index], self._down[index], self._down_bias[index]
        gate_up, gate_up_bias, down, down_bias = (weight.to(x.dtype) for weight in weights)
        inner = clamped_swiglu(F.linear(x, gate_up, gate_up_bias), self._alpha, self._limit)
        return F.linear(inner, down, down_bias)
