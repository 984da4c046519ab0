"""The base of decoder families: RMS norms, rotary attention and a gated MLP, with pre-norm residuals.

A family is a subclass named after its architecture, in a file of its own, and an entry in
``pdserve/model/families.py``; docs/adding-a-model.md shows one. It overrides how attention, MLPs or whole layers are
made, and ``checkpoint_name`` where its tensors have other names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from pdserve.model.attention_spec import AttentionSpec
from pdserve.model.model_config import ModelConfig
from pdserve.pausing import Pausing, complete
from runner.attention import AttentionBackend
from runner.batch import Activations, RotaryCosSin
from runner.distributed.parallel_state import ParallelState
from runner.models.layers.attention import Attention
from runner.models.layers.context import ModelContext
from runner.models.layers.mlp import MLP, MLPBlock
from runner.models.layers.moe import MixtureOfExperts
from runner.models.layers.rotary import RotaryEmbedding
from runner.models.layers.vocabulary import ParallelLMHead, VocabParallelEmbedding
from runner.models.layers.weight_shard import WeightGroup, WeightShard, WeightShards, prefixed
from runner.placement import TensorPlacement

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class RMSNorm:
    def __init__(self, context: ModelContext) -> None:
        placement = context.placement
        self.weight = torch.empty(context.config.hidden_size, device=placement.device, dtype=placement.dtype)
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
        yield "post_attention_layernorm.weight", WeightShard.full(self._norm.weight)
        yield from prefixed("mlp.", self.block.weight_shards())

    def process_weights_after_loading(self) -> None:
        self.block.process_weights_after_loading()


class DecoderLayer:
    def __init__(self, context: ModelContext, attention: Attention, mlp: MLPBlock) -> None:
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
        yield "input_layernorm.weight", WeightShard.full(self.input_norm.weight)
        yield from prefixed("self_attn.", self.attention.weight_shards())
        yield from self.mlp.weight_shards()

    def process_weights_after_loading(self) -> None:
        self.attention.process_weights_after_loading()
        self.mlp.process_weights_after_loading()


class Decoder:
    """A rank's part of a model: token ids to hidden states, hidden states to logits.

    The first stage has the embedding, the last stage the final norm and the head. Fill and process each of
    the ``weight_groups``, then call the model.
    """

    def __init__(self, config: ModelConfig, parallel: ParallelState, placement: TensorPlacement) -> None:
        """``config`` is that of the whole model."""
        self.config = config
        self.context = ModelContext.build(config, parallel, placement)
        position = self.context.position
        self._parallel = parallel
        self._first_layer = position.layers.start
        moe = config.moe
        self._other_experts = set(range(moe.num_experts)).difference(position.local_experts(moe)) if moe else set()
        self._other_layers = set(range(config.num_layers + config.num_nextn_layers)).difference(position.layers)
        self._embedding = VocabParallelEmbedding(self.context) if position.is_first else None
        self.layers = [self.make_layer(layer) for layer in range(len(position.layers))]
        self._next_norms = [layer.input_norm for layer in self.layers[1:]]
        self._norm = RMSNorm(self.context) if position.is_last else None
        self._head = ParallelLMHead(self.context) if position.is_last else None
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings, placement.device)

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer of this rank."""
        layers = self.context.position.layers
        return self.config.attention[layers.start : layers.stop]

    @property
    def depends_on_length(self) -> bool:
        """Whether rotary frequencies depend on the length of a sequence."""
        return self.rotary.depends_on_length

    def make_attention(self, layer: int) -> Attention:
        """Create the attention of a layer; ``layer`` counts from 0 on this rank."""
        return Attention(self.context, layer)

    def make_mlp(self, layer: int) -> MLPBlock:
        """Create the MLP or the experts of a layer; ``layer`` counts from 0 in the whole model."""
        moe = self.config.moe
        if moe is None or moe.is_dense(layer):
            return MLP(self.context, self.config.intermediate_size)
        return MixtureOfExperts(self.context)

    def make_layer(self, layer: int) -> DecoderLayer:
        return DecoderLayer(self.context, self.make_attention(layer), self.make_mlp(self._first_layer + layer))

    def checkpoint_name(self, name: str) -> str:
        """Return the checkpoint's name of a tensor that Llama calls ``name``."""
        return name

    def __call__(
        self,
        inputs: Tensor,
        positions: Tensor,
        lengths: Tensor | None,
        backend: AttentionBackend,
        output_tokens: Tensor | None = None,
    ) -> Tensor:
        """Return the result of ``forward``."""
        return complete(self.forward(inputs, positions, lengths, backend, output_tokens))

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        lengths: Tensor | None,
        backend: AttentionBackend,
        output_tokens: Tensor | None = None,
    ) -> Pausing[Tensor]:
        """Compute the layers of this rank for tokens at ``positions`` [tokens], integers; pause between layers.

        ``inputs`` is the token ids [tokens] on the first stage, else the result of the stage before, which is
        overwritten. The result is hidden states [tokens, hidden_size]: on the last stage normed for ``logits``, else
        the residual after these layers, the next stage's input.

        ``lengths``: see RotaryEmbedding. ``backend`` has planned the same tokens. ``output_tokens`` [kept] selects, on
        the last stage, the tokens of the result; other tokens need only the keys and values of the last layer.
        The call never waits for the device, so a CUDA graph can capture it.
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
        if self._norm is None:
            return residual.add_(self._parallel.all_reduce(output))
        return self._norm.add(output, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, vocab_size] from rows of hidden states [rows, hidden_size], on the last stage."""
        assert self._head is not None
        return self._head(hidden)

    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        """Write ``logits`` to ``out``, on GPUs."""
        assert self._head is not None
        self._head.write(hidden, out)

    def run_products(self, tokens: Sequence[int], samples: Sequence[int]) -> None:
        """Multiply by a weight of each shape for these numbers of tokens, and compute logits for those of samples.

        cuBLAS chooses kernels by these numbers. Loading one that was not used before waits until the device is idle.
        """
        for (in_features, _), linear in self.context.linears.items():
            for count in tokens:
                linear.apply(self._zeros(count, in_features))
        if self._head is not None:
            for count in samples:
                self.logits(self._zeros(count, self.config.hidden_size))

    def _zeros(self, rows: int, width: int) -> Tensor:
        return torch.zeros(rows, width, dtype=self.context.placement.dtype, device=self.context.placement.device)

    def weight_shards(self) -> WeightShards:
        """Yield this rank's part of each of the checkpoint's tensors, by the checkpoint's name."""
        return (shard for group in self.weight_groups() for shard in group.shards())

    def weight_groups(self) -> Iterator[WeightGroup]:
        """Yield the tensors in groups of at most a layer; packing one needs memory for the group, not for the model."""
        yield self._group("", self._vocabulary_shards, self._process_head)
        for index, layer in enumerate(self.layers, self._first_layer):
            yield self._group(f"model.layers.{index}.", layer.weight_shards, layer.process_weights_after_loading)

    def ignored_weights(self, stored: Iterable[str]) -> set[str]:
        """Return the stored tensors that other ranks load and check, and a tied head's copy of the embedding."""
        mine = {name for name, _ in self.weight_shards()}
        tables = {self.checkpoint_name(name) for name in (_EMBEDDING, _NORM, _HEAD)}
        return {name for name in stored if name not in mine and (name in tables or self._is_elsewhere(name))}

    def _is_elsewhere(self, name: str) -> bool:
        layer, expert = _LAYER.match(name), _EXPERT.search(name)
        if expert is not None and int(expert[1]) in self._other_experts:
            return True
        return layer is not None and int(layer[1]) in self._other_layers

    def _group(self, prefix: str, shards: Callable[[], WeightShards], process: Callable[[], None]) -> WeightGroup:
        def named() -> WeightShards:
            return ((self.checkpoint_name(name), shard) for name, shard in prefixed(prefix, shards()))

        return WeightGroup(named, process)

    def _vocabulary_shards(self) -> WeightShards:
        if self._embedding is not None:
            yield _EMBEDDING, self._embedding.weight_shard()
        if self._norm is not None:
            yield _NORM, WeightShard.full(self._norm.weight)
        if self._head is not None and not self.config.tie_word_embeddings:
            yield _HEAD, self._head.weight_shard()
        elif self._head is not None and self._embedding is None:
            yield _EMBEDDING, self._head.weight_shard()

    def _process_head(self) -> None:
        if self._head is None:
            return
        if self.config.tie_word_embeddings and self._embedding is not None:
            self._head.tie(self._embedding)
        self._head.process_weights_after_loading()

    def _begin(self, inputs: Tensor) -> tuple[Activations, Tensor]:
        """Return x, normed for the first layer, and the residual."""
        norm = self.layers[0].input_norm
        if self._embedding is None:
            return norm(inputs), inputs
        embedded = self._embedding(inputs)
        if self.context.position.parallel.tp == 1:
            return norm(embedded), embedded
        residual = torch.zeros_like(embedded)
        return norm.add(embedded, residual), residual
