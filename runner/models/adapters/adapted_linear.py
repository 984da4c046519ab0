"""A linear layer with adapters around its weights."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.batch import Quantized
from runner.models.adapters.slots import LayerSlots
from runner.models.layers.weight_shard import AdapterPlace, ShardRange, WeightShard, WeightShards
from runner.models.quantization import GatedActivation, LinearMethod

ADAPTER_SUFFIX = ".lora"  # behind a projection's name, in the names of its AdapterPlace


class AdaptedLinear(LinearMethod):
    """Adds the delta of each token's adapter to the result of another method; without adapters in a step, it is that.

    The delta takes activations that are not quantized, in the dtype of the model.
    """

    def __init__(self, base: LinearMethod, slots: LayerSlots) -> None:
        self._base = base
        self._slots = slots

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        return self._base.bias

    def weight_shards(
        self, first_output: int, outputs: ShardRange, inputs: ShardRange, rows: Tensor | None = None
    ) -> WeightShards:
        """Yield the weights of the base, and the place of adapters of the projection."""
        yield from self._base.weight_shards(first_output, outputs, inputs, rows)
        shape = torch.empty(outputs.size, inputs.size, device="meta")
        place = WeightShard.of_ranges(shape, (outputs, inputs))
        yield (
            ADAPTER_SUFFIX.lstrip("."),
            AdapterPlace(
                memory=shape,
                full_shape=place.full_shape,
                dim=place.dim,
                start=place.start,
                rows=rows,
                linear=self._slots.number,
                member=self._slots.begins.index(first_output),
            ),
        )

    def process_weights_after_loading(self) -> None:
        self._base.process_weights_after_loading()

    def restore_weights(self) -> None:
        self._base.restore_weights()

    def apply(self, x: Tensor) -> Tensor:
        y = self._base.apply(x)
        if self._slots.tokens.active:
            self._slots.add_delta(x, y)
        return y

    def quantized_group(self, tokens: int) -> int:
        """Return 0 in a step with adapters: their products need activations that are not quantized."""
        return 0 if self._slots.tokens.active else self._base.quantized_group(tokens)

    def apply_quantized(self, x: Quantized) -> Tensor:
        assert not self._slots.tokens.active, "a step with adapters quantizes no activations before products"
        return self._base.apply_quantized(x)

    def apply_gated(self, gate_up: Tensor, activation: GatedActivation) -> Tensor:
        if self._slots.tokens.active:
            return self.apply(activation(gate_up))
        return self._base.apply_gated(gate_up, activation)
