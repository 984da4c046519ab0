"""Linear layers split over the tensor shards of a stage.

column parallel   each shard computes a range of the outputs from all inputs
row parallel      each shard has a range of the inputs; the shards' results are still to be summed
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from runner.batch import Activations, Quantized
from runner.models.layers.context import ModelContext
from runner.models.layers.weight_shard import ShardRange, WeightShards, prefixed


class MergedColumnParallelLinear:
    """Projections of the same inputs, merged into one product."""

    def __init__(
        self,
        context: ModelContext,
        in_features: int,
        outputs: Mapping[str, ShardRange],
        bias: bool,
        rows: Mapping[str, Tensor | None] | None = None,
    ) -> None:
        """``outputs`` has this shard's outputs of each projection, by its name in the checkpoint.

        ``rows`` has their order in memory, as outputs of all shards, for projections stored in another order.
        """
        self._in_features = in_features
        self._outputs = outputs
        self._rows = rows or {}
        self._linear = context.linear(in_features, outputs, bias)
        self.quantized_group = self._linear.quantized_group

    def apply(self, x: Activations) -> Tensor:
        """Return [tokens, sum of the outputs] of x [tokens, in_features]."""
        return self._linear.apply_quantized(x) if isinstance(x, Quantized) else self._linear.apply(x)

    def weight_shards(self) -> WeightShards:
        first = 0
        inputs = ShardRange.full(self._in_features)
        for name, output in self._outputs.items():
            yield from prefixed(f"{name}.", self._linear.weight_shards(first, output, inputs, self._rows.get(name)))
            first += output.size

    def process_weights_after_loading(self) -> None:
        self._linear.process_weights_after_loading()


class RowParallelLinear:
    """One projection, whose inputs are split."""

    def __init__(self, context: ModelContext, name: str, inputs: ShardRange, out_features: int, bias: bool) -> None:
        """``name`` is the projection's name in the checkpoint."""
        self._name = name
        self._inputs = inputs
        self._outputs = ShardRange.full(out_features)
        self._is_first_shard = context.position.shard == 0
        self._linear = context.linear(inputs.size, {name: self._outputs}, bias)
        self.apply = self._linear.apply  # [tokens, inputs.size] → this shard's part of the sum [tokens, out_features]
        self.apply_gated = self._linear.apply_gated  # gates and ups [tokens, 2 * inputs.size] → this shard's part

    def weight_shards(self) -> WeightShards:
        return prefixed(f"{self._name}.", self._linear.weight_shards(0, self._outputs, self._inputs))

    def process_weights_after_loading(self) -> None:
        if self._linear.bias is not None and not self._is_first_shard:
            self._linear.bias.zero_()  # the sum over shards must contain the bias once
        self._linear.process_weights_after_loading()
