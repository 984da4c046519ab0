"""Experts with unquantized weights, stacked: one tensor of all gates and ups, and one of all downs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.batch import Routing, SharedGate
from runner.kernels.experts.expert_reference import sum_of_experts
from runner.models.layers.weight_shard import WeightShard, WeightShards
from runner.models.quantization import ExpertsMethod, ExpertsShard, GatedActivation, LayerOptions
from runner.placement import TensorPlacement


class UnquantizedExperts(ExpertsMethod):
    """On GPUs grouped products; on CPUs one product per expert, in the dtype of activations."""

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
        inner = shard.inner.size
        place: dict[str, Any] = {"device": placement.device, "dtype": placement.stored}
        outputs = 2 * inner if activation.has_gates else inner
        self._gate_up = torch.empty(num_experts, outputs, shard.hidden_size, **place)
        self._down = torch.empty(num_experts, shard.hidden_size, inner, **place)

    def weight_shards(self) -> WeightShards:
        hidden_size = self._shard.hidden_size
        inner = self._shard.inner
        outputs = (inner.full_size, hidden_size)
        inputs = (hidden_size, inner.full_size)
        for index, expert in enumerate(self._shard.local):
            *gate, up = self._gate_up[index].split(inner.size)
            for name, memory, full, dim in (
                *(("gate_proj", memory, outputs, 0) for memory in gate),
                ("up_proj", up, outputs, 0),
                ("down_proj", self._down[index], inputs, 1),
            ):
                yield f"{expert}.{name}.weight", WeightShard(memory, full, dim, inner.start)

    def process_weights_after_loading(self) -> None:
        """Nothing: the grouped products read the checkpoint's form."""

    def apply(
        self, x: Tensor, routing: Routing, shared: Tensor | None = None, gate: SharedGate | None = None
    ) -> Tensor:
        local = self._shard.local
        if not self._use_triton:
            return sum_of_experts(x, routing, local, self._expert, shared, gate)
        from runner.kernels.experts.grouped_gemm import grouped_gemm, sum_experts
        from runner.kernels.experts.grouped_tiles import group_rows

        rows = group_rows(routing.experts, local)
        inner = self._activation(grouped_gemm(x, self._gate_up, rows))
        return sum_experts(grouped_gemm(inner, self._down, rows), routing, local, shared, gate)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        index = number - self._shard.local.start
        inner = self._activation(F.linear(x, self._gate_up[index].to(x.dtype)))
        return F.linear(inner, self._down[index].to(x.dtype))
