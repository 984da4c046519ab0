"""Experts whose weights stay in 4 bits in memory, as ``four_bits.py`` keeps them in linear layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pdserve.model.quantization.layer_form import LayerForm
from runner.batch import Routing, SharedGate
from runner.kernels.experts.expert_reference import sum_of_experts
from runner.kernels.four_bits.weights import FourBitExperts
from runner.models.layers.weight_shard import ShardRange, WeightShards
from runner.models.quantization import ExpertsMethod, ExpertsShard, GatedActivation, LayerOptions
from runner.models.quantization.four_bits import FilledWeight, kernel_form
from runner.placement import TensorPlacement


class FourBitExpertsMethod(ExpertsMethod):
    """Grouped products on GPUs; on CPUs one product per expert."""

    def __init__(
        self,
        shard: ExpertsShard,
        activation: GatedActivation,
        placement: TensorPlacement,
        options: LayerOptions | None = None,
    ) -> None:
        assert isinstance(options, LayerForm)
        assert not options.has_order, "keep_layers dequantizes them"
        self._shard = shard
        self._activation = activation
        self._use_triton = placement.use_triton
        experts = len(shard.local)
        inner = shard.inner.size
        hidden_size = shard.hidden_size
        self._gate_up = _Stack(experts, 2 * inner, hidden_size, options, placement)
        self._down = _Stack(experts, hidden_size, inner, options, placement)

    def weight_shards(self) -> WeightShards:
        hidden = ShardRange.full(self._shard.hidden_size)
        inner = self._shard.inner
        for index, expert in enumerate(self._shard.local):
            yield from self._gate_up.shards(f"{expert}.gate_proj.weight", index, 0, inner, hidden)
            yield from self._gate_up.shards(f"{expert}.up_proj.weight", index, inner.size, inner, hidden)
            yield from self._down.shards(f"{expert}.down_proj.weight", index, 0, hidden, inner)

    def process_weights_after_loading(self) -> None:
        """Pack the filled tensors, always to the same address: captured graphs read it. Raises CheckpointError."""
        self._gate_up.pack()
        self._down.pack()

    def apply(
        self, x: Tensor, routing: Routing, shared: Tensor | None = None, gate: SharedGate | None = None
    ) -> Tensor:
        local = self._shard.local
        if not self._use_triton:
            return sum_of_experts(x, routing, local, self._expert, shared, gate)
        from runner.kernels.experts.grouped_gemm import sum_experts

        gate_up = self._gate_up.weights
        down = self._down.weights
        rows = gate_up.rows_of_experts(routing.experts, local)
        inner = self._activation(gate_up.product(x, rows))
        return sum_experts(down.product(inner, rows), routing, local, shared, gate)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        index = number - self._shard.local.start
        inner = self._activation(F.linear(x, self._gate_up.weights.dequantized(index, x.dtype)))
        return F.linear(inner, self._down.weights.dequantized(index, x.dtype))


class _Stack:
    """One of the two weights [outputs, inputs] of all experts. They are filled in one memory."""

    def __init__(self, experts: int, outputs: int, inputs: int, form: LayerForm, placement: TensorPlacement) -> None:
        device = placement.device
        self._filled = FilledWeight(experts * outputs, inputs, form, device)
        use_triton = placement.use_triton
        self.weights = FourBitExperts(
            experts, outputs, inputs, kernel_form(form, inputs), device, use_triton=use_triton
        )
        self._rows = [slice(expert * outputs, (expert + 1) * outputs) for expert in range(experts)]
        self._is_packed = False

    def shards(self, name: str, index: int, first: int, outputs: ShardRange, inputs: ShardRange) -> WeightShards:
        """Yield one projection of an expert, whose outputs begin at ``first``."""
        return self._filled.shards(name, self._rows[index].start + first, outputs, inputs, None, self.unpack)

    def pack(self) -> None:
        if self._filled.is_empty:
            return
        self.weights.pack_all(*self._filled.tensors)
        self._filled.drop()
        self._is_packed = True

    def unpack(self) -> None:
        """Undo ``pack``."""
        if not self._filled.is_empty:
            return
        self._filled.allocate()
        for index, rows in enumerate(self._rows if self._is_packed else ()):
            for memory, tensor in zip(self._filled.tensors, self.weights.unpack(index), strict=True):
                if memory is not None and tensor is not None:
                    memory[rows] = tensor
