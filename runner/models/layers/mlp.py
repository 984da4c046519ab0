"""The gated MLP, and the interface of blocks that may take its place."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from runner.batch import Activations
from runner.models.layers.context import ModelContext
from runner.models.layers.parallel_linear import MergedColumnParallelLinear, RowParallelLinear
from runner.models.layers.weight_shard import ShardRange, WeightShards


class MLPBlock(Protocol):
    """An MLP or a mixture of experts. Tensors are named behind the layer's "mlp."."""

    def quantized_group(self, tokens: int) -> int:
        """Return the inputs per scale of x for ``apply`` in a step of ``tokens``; 0 if x must not be quantized."""

    def apply(self, x: Activations) -> Tensor:
        """Return this shard's part of [tokens, hidden_size], still to be summed, of x [tokens, hidden_size]."""

    def weight_shards(self) -> WeightShards: ...

    def process_weights_after_loading(self) -> None: ...


class MLP:
    """down(silu(gate(x)) * up(x)); gate and up are one product."""

    def __init__(self, context: ModelContext, intermediate_size: int, *, bias: bool = False) -> None:
        """``intermediate_size`` counts all shards."""
        hidden_size = context.config.hidden_size
        self._activation = context.silu
        inner = ShardRange.even(intermediate_size, context.position)
        outputs = {"gate_proj": inner, "up_proj": inner}
        self._gate_up = MergedColumnParallelLinear(context, hidden_size, outputs, bias)
        self._down = RowParallelLinear(context, "down_proj", inner, hidden_size, bias)
        self.quantized_group = self._gate_up.quantized_group

    def apply(self, x: Activations) -> Tensor:
        return self._down.apply_gated(self._gate_up.apply(x), self._activation)

    def weight_shards(self) -> WeightShards:
        yield from self._gate_up.weight_shards()
        yield from self._down.weight_shards()

    def process_weights_after_loading(self) -> None:
        self._gate_up.process_weights_after_loading()
        self._down.process_weights_after_loading()


class UngatedMLP:
    """down(relu(up(x))²)."""

    def __init__(self, context: ModelContext, intermediate_size: int, *, bias: bool = False) -> None:
        """``intermediate_size`` counts all shards."""
        hidden_size = context.config.hidden_size
        inner = ShardRange.even(intermediate_size, context.position)
        self._up = MergedColumnParallelLinear(context, hidden_size, {"up_proj": inner}, bias)
        self._down = RowParallelLinear(context, "down_proj", inner, hidden_size, bias)
        self.quantized_group = self._up.quantized_group

    def apply(self, x: Activations) -> Tensor:
        return self._down.apply(squared_relu(self._up.apply(x)))

    def weight_shards(self) -> WeightShards:
        yield from self._up.weight_shards()
        yield from self._down.weight_shards()

    def process_weights_after_loading(self) -> None:
        self._up.process_weights_after_loading()
        self._down.process_weights_after_loading()


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square_()
