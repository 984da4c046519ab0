"""Layers of one part behind an RMS norm: what mixes tokens, or an MLP (Nemotron-H)."""

from __future__ import annotations

from torch import Tensor

from runner.attention import AttentionBackend
from runner.batch import Activations, Quantized, RotaryCosSin
from runner.models.layers.context import ModelContext
from runner.models.layers.decoder_layer import InputNorm, Mixer
from runner.models.layers.mlp import MLPBlock
from runner.models.layers.weight_shard import WeightShards, prefixed


class MixerLayer:
    """A layer that mixes tokens behind an RMS norm, and nothing else."""

    def __init__(self, context: ModelContext, mixer: Mixer) -> None:
        self.input_norm = InputNorm(context, mixer.quantized_group)
        self.attention = mixer

    def __call__(
        self,
        x: Activations,
        residual: Tensor,
        rotary: RotaryCosSin,
        backend: AttentionBackend,
        output_tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return this shard's part of the output, and the residual; see ``DecoderLayer``."""
        mixed = self.attention(x, rotary, backend)
        if output_tokens is not None:
            mixed = mixed.index_select(0, output_tokens)
            residual = residual.index_select(0, output_tokens)
        return self.attention.project(mixed), residual

    def store(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> None:
        self.attention.store(x, rotary, backend)

    def weight_shards(self) -> WeightShards:
        yield "norm.weight", self.input_norm.weight_shard()
        yield from prefixed("mixer.", self.attention.weight_shards())

    def process_weights_after_loading(self) -> None:
        self.input_norm.process_weights_after_loading()
        self.attention.process_weights_after_loading()


class MLPLayer:
    """A layer that is an MLP, or experts, behind an RMS norm."""

    def __init__(self, context: ModelContext, block: MLPBlock) -> None:
        self.input_norm = InputNorm(context, block.quantized_group)
        self._block = block

    def __call__(
        self,
        x: Activations,
        residual: Tensor,
        rotary: RotaryCosSin,
        backend: AttentionBackend,
        output_tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return this shard's part of the output, and the residual; see ``DecoderLayer``."""
        if output_tokens is not None:
            x = _selected(x, output_tokens)
            residual = residual.index_select(0, output_tokens)
        return self._block.apply(x), residual

    def store(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> None:
        """Do nothing: the layer keeps nothing of tokens."""

    def weight_shards(self) -> WeightShards:
        yield "norm.weight", self.input_norm.weight_shard()
        yield from prefixed("mixer.", self._block.weight_shards())

    def process_weights_after_loading(self) -> None:
        self.input_norm.process_weights_after_loading()
        self._block.process_weights_after_loading()


def _selected(x: Activations, tokens: Tensor) -> Activations:
    if isinstance(x, Quantized):
        return Quantized(*(part.index_select(0, tokens) for part in x))
    return x.index_select(0, tokens)
