"""One layer of a decoder: what mixes tokens, and the MLP, each behind an RMS norm of the residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from runner.attention import AttentionBackend
from runner.batch import Activations, RotaryCosSin
from runner.models.layers.attention import Attention
from runner.models.layers.context import ModelContext
from runner.models.layers.gated_delta_net import GatedDeltaNet
from runner.models.layers.hybrid import ParallelMixers
from runner.models.layers.latent_attention import LatentAttention
from runner.models.layers.mamba2 import Mamba2Mixer
from runner.models.layers.mlp import MLPBlock
from runner.models.layers.norm_weight import NormWeight
from runner.models.layers.short_convolution import ShortConvolution
from runner.models.layers.weight_shard import WeightShards, prefixed

# Mixes the tokens of a layer.
Mixer = Attention | LatentAttention | GatedDeltaNet | ShortConvolution | Mamba2Mixer | ParallelMixers


class RMSNorm:
    def __init__(self, context: ModelContext) -> None:
        config = context.config
        self._norm = NormWeight(config.hidden_size, context.placement, config.centered_norms)
        self.weight = self._norm.weight
        self.weight_shard = self._norm.weight_shard
        self.process_weights_after_loading = self._norm.process_weights_after_loading
        self._ops = context.ops

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add the sum of x over the tensor shards to ``residual`` in place, and norm the result."""
        return self._ops.add_rms_norm(x, residual, self.weight)


class InputNorm:
    """The RMS norm before a product, quantized if the product takes FP8."""

    def __init__(self, context: ModelContext, quantized_group: Callable[[int], int]) -> None:
        """``quantized_group`` is the method of the product's LinearMethod."""
        self._norm = RMSNorm(context)
        self._ops = context.ops
        self._quantized_group = quantized_group
        self.weight = self._norm.weight
        self.weight_shard = self._norm.weight_shard
        self.process_weights_after_loading = self._norm.process_weights_after_loading

    def __call__(self, x: Tensor) -> Activations:
        group = self._quantized_group(len(x))
        return self._ops.quantized_rms_norm(x, None, self.weight, group) if group else self._norm(x)

    def add(self, x: Tensor, residual: Tensor) -> Activations:
        """Add the sum of x over the tensor shards to ``residual`` in place, and norm the result."""
        group = self._quantized_group(len(x))
        if group:
            return self._ops.quantized_rms_norm(x, residual, self.weight, group)
        return self._norm.add(x, residual)


class NormedMLP:
    """The MLP, or the mixture of experts, of the normed residual."""

    def __init__(self, context: ModelContext, block: MLPBlock) -> None:
        self._norm = InputNorm(context, block.quantized_group)
        self.block = block

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add the sum of x over the tensor shards to ``residual`` in place, and compute the MLP of the result."""
        return self.block.apply(self._norm.add(x, residual))

    def weight_shards(self) -> WeightShards:
        yield "post_attention_layernorm.weight", self._norm.weight_shard()
        yield from prefixed("mlp.", self.block.weight_shards())

    def process_weights_after_loading(self) -> None:
        self._norm.process_weights_after_loading()
        self.block.process_weights_after_loading()


class AnyLayer(Protocol):
    """A layer behind an RMS norm of the residual; see ``DecoderLayer``."""

    @property
    def input_norm(self) -> InputNorm: ...

    def __call__(
        self,
        x: Activations,
        residual: Tensor,
        rotary: RotaryCosSin,
        backend: AttentionBackend,
        output_tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def store(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> None:
        """Keep what later tokens need, where no output is asked for."""

    def weight_shards(self) -> WeightShards: ...

    def process_weights_after_loading(self) -> None: ...


class DecoderLayer:
    def __init__(self, context: ModelContext, attention: Mixer, mlp: MLPBlock) -> None:
        self.input_norm = InputNorm(context, attention.quantized_group)
        self.attention = attention
        self.mlp = NormedMLP(context, mlp)

    def __call__(
        self,
        x: Activations,
        residual: Tensor,
        rotary: RotaryCosSin,
        backend: AttentionBackend,
        output_tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return this shard's part of the layer's output, and the residual without it.

        x is the normed residual, quantized or not; all are [tokens, hidden_size]. The attention output is added to the
        residual in place. The caller adds the result in the norm that follows.
        ``output_tokens`` [kept] selects tokens after attention: then the results are [kept, hidden_size].
        """
        attended = self.attention(x, rotary, backend)
        if output_tokens is not None:
            attended = attended.index_select(0, output_tokens)
            residual = residual.index_select(0, output_tokens)
        return self.mlp.add(self.attention.project(attended), residual), residual

    def store(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> None:
        """Store keys and values, and update recurrent states, where no output is asked for."""
        self.attention.store(x, rotary, backend)

    def weight_shards(self) -> WeightShards:
        yield "input_layernorm.weight", self.input_norm.weight_shard()
        yield from prefixed(f"{self.attention.name}.", self.attention.weight_shards())
        yield from self.mlp.weight_shards()

    def process_weights_after_loading(self) -> None:
        self.input_norm.process_weights_after_loading()
        self.attention.process_weights_after_loading()
        self.mlp.process_weights_after_loading()
