"""The base of decoder families: RMS norms, rotary attention and a gated MLP, with pre-norm residuals.

A family is a subclass named after its architecture, in a file of its own, and an entry in
``pdserve/model/families.py``; docs/adding-a-model.md shows one. It overrides how attention, MLPs or whole layers are
made, and ``checkpoint_name`` where its tensors have other names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdserve.config.parallel import shard_of
from pdserve.model.model_config import ModelConfig
from pdserve.pausing import Pausing
from runner.attention import AttentionBackend
from runner.batch import Activations, RotaryCosSin
from runner.distributed.parallel_state import ParallelState
from runner.models.layers.attention import Attention
from runner.models.layers.context import ModelContext
from runner.models.layers.gated_delta_net import GatedDeltaNet
from runner.models.layers.latent_attention import LatentAttention
from runner.models.layers.mlp import MLP, MLPBlock
from runner.models.layers.moe import MixtureOfExperts
from runner.models.layers.norm_weight import NormWeight
from runner.models.layers.rotary import RotaryEmbedding
from runner.models.layers.vocabulary import ParallelLMHead, VocabParallelEmbedding
from runner.models.layers.weight_shard import WeightShards, prefixed
from runner.models.model import Model
from runner.placement import TensorPlacement

Mixer = Attention | LatentAttention | GatedDeltaNet  # what mixes the tokens of a layer


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
        self._norm, self._ops, self._quantized_group = RMSNorm(context), context.ops, quantized_group
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
            attended, residual = attended.index_select(0, output_tokens), residual.index_select(0, output_tokens)
        return self.mlp.add(self.attention.project(attended), residual), residual

    def weight_shards(self) -> WeightShards:
        yield "input_layernorm.weight", self.input_norm.weight_shard()
        yield from prefixed(f"{self.attention.name}.", self.attention.weight_shards())
        yield from self.mlp.weight_shards()

    def process_weights_after_loading(self) -> None:
        self.input_norm.process_weights_after_loading()
        self.attention.process_weights_after_loading()
        self.mlp.process_weights_after_loading()


class Decoder(Model):
    """The first stage has the embedding, the last stage the final norm and the head.

    ``runner/loading/decoder_weights.py`` fills the weights; then the model can be called.
    """

    unused_tensors: tuple[str, ...] = ()  # first parts of the names of tensors that are not loaded

    def __init__(self, config: ModelConfig, parallel: ParallelState, placement: TensorPlacement) -> None:
        """``config`` is that of the whole model."""
        self.config = config
        self.context = ModelContext.build(config, parallel, placement)
        position = self.context.position
        self._parallel = parallel
        self.first_layer = position.layers.start
        self.embedding = VocabParallelEmbedding(self.context) if position.is_first else None
        self.layers = [self.make_layer(layer) for layer in range(len(position.layers))]
        self._next_norms = [layer.input_norm for layer in self.layers[1:]]
        self.norm = RMSNorm(self.context) if position.is_last else None
        self.head = ParallelLMHead(self.context) if position.is_last else None
        self.rotary = RotaryEmbedding(
            config.rope, config.rope_head_dim, config.max_position_embeddings, placement.device
        )
        self.attention = shard_of(config, position).attention
        self.depends_on_length = self.rotary.depends_on_length

    def make_attention(self, layer: int) -> Attention | LatentAttention:
        """Create the attention of a layer; ``layer`` counts from 0 on this rank, without recurrent layers."""
        return Attention(self.context, layer)

    def make_mlp(self, layer: int) -> MLPBlock:
        """Create the MLP or the experts of a layer; ``layer`` counts from 0 in the whole model."""
        moe = self.config.moe
        if moe is None or moe.is_dense(layer):
            return MLP(self.context, self.config.intermediate_size)
        return MixtureOfExperts(self.context)

    def make_layer(self, layer: int) -> DecoderLayer:
        return DecoderLayer(self.context, self.make_mixer(layer), self.make_mlp(self.first_layer + layer))

    def make_mixer(self, layer: int) -> Mixer:
        """Create what mixes tokens in a layer; ``layer`` counts from 0 on this rank."""
        return self.make_attention(layer)

    def checkpoint_name(self, name: str) -> str:
        """Return the checkpoint's name of a tensor that Llama calls ``name``."""
        return name

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        lengths: Tensor | None,
        backend: AttentionBackend,
        output_tokens: Tensor | None = None,
    ) -> Pausing[Tensor]:
        """Compute the layers of this rank; pause between two of them. See Model.

        Tokens that ``output_tokens`` leaves out need only the keys and values of the last layer. No call waits for the
        device, so a CUDA graph can capture them.
        """
        rotary = self.rotary(positions, lengths)
        x, residual = self._begin(inputs)
        *others, last = self.layers
        for layer, next_norm in zip(others, self._next_norms, strict=True):
            output, residual = layer(x, residual, rotary, backend)
            x = next_norm.add(output, residual)
            yield
        if output_tokens is not None and not len(output_tokens):
            last.attention.store(x, rotary, backend)
            return residual[:0]
        output, residual = last(x, residual, rotary, backend, output_tokens)
        if self.norm is None:
            return residual.add_(self._parallel.all_reduce(output))
        return self.norm.add(output, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.head is not None
        return self.head(hidden)

    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        """On GPUs only."""
        assert self.head is not None
        self.head.write(hidden, out)

    def run_products(self, tokens: Sequence[int], samples: Sequence[int]) -> None:
        for (in_features, _), linear in self.context.linears.items():
            for count in tokens:
                linear.apply(self._zeros(count, in_features))
        if self.head is not None:
            for count in samples:
                self.logits(self._zeros(count, self.config.hidden_size))

    def _zeros(self, rows: int, width: int) -> Tensor:
        return torch.zeros(rows, width, dtype=self.context.placement.dtype, device=self.context.placement.device)

    def _begin(self, inputs: Tensor) -> tuple[Activations, Tensor]:
        """Return x, normed for the first layer, and the residual."""
        norm = self.layers[0].input_norm
        if self.embedding is None:
            return norm(inputs), inputs
        embedded = self.embedding(inputs)
        if self.context.position.parallel.tp == 1:
            return norm(embedded), embedded
        residual = torch.zeros_like(embedded)
        return norm.add(embedded, residual), residual
