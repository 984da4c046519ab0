"""A layer behind the model's last one that predicts one token further: multi-token prediction (MTP).

At position t it takes the hidden state of t, normed for the head, and the embedding of token t + 1. The head turns
its result into logits of token t + 2 (arXiv 2412.19437, section 2.2). For the prediction after that, its result takes
the place of the hidden state. It attends to earlier positions by a KV cache of its own:

    model        h0    h1    h2            hidden states of t0, t1, t2
    predictor  t1,h0 t2,h1 t3,h2           t3 was sampled from h2
    drafts                   │ d4          then d4 and its own result at position 2 give d5, and so on
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from runner.attention import AttentionBackend
from runner.batch import RotaryCosSin
from runner.models.layers.context import ModelContext
from runner.models.layers.decoder_layer import DecoderLayer, RMSNorm
from runner.models.layers.vocabulary import VocabParallelEmbedding
from runner.models.layers.weight_shard import ShardRange, WeightShards, prefixed
from runner.models.quantization.unquantized import UnquantizedLinearMethod


class PredictorNames(NamedTuple):
    """Names of a predictor's tensors in a checkpoint, which begin with ``ModelConfig.predictor``, and its inputs."""

    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str  # applied to its result
    layer: str = ""  # before the names of its layer, which are as in other layers
    hidden_first: bool = False  # the projection takes hidden states, then embeddings
    masks_first: bool = True  # embeddings at position 0 count as zeros


#: DeepSeek-V3 and GLM-4.5, behind the layers of the model. Their copies of embedding and head are not loaded.
NEXTN_NAMES = PredictorNames(
    embedding_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    norm="shared_head.norm",
)

#: Qwen3-Next and Qwen3.5.
QWEN_NAMES = PredictorNames(
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    norm="norm",
    layer="layers.0.",
    masks_first=False,
)


class TokenPredictor:
    """The embedding and the head are the model's."""

    def __init__(
        self,
        context: ModelContext,
        layer: DecoderLayer,
        names: PredictorNames,
        embedding: VocabParallelEmbedding | None,
    ) -> None:
        """``embedding`` is the model's, None if another stage has it: then a copy is loaded."""
        size = context.config.hidden_size
        self._parallel = context.parallel
        self._layer = layer
        self._names = names
        self._size = size
        self.own_embedding = VocabParallelEmbedding(context) if embedding is None else None
        self._embedding = self.own_embedding or embedding
        self._embedding_norm, self._hidden_norm, self._norm = (RMSNorm(context) for _ in range(3))
        self._projection = UnquantizedLinearMethod(2 * size, size, False, context.placement)
        context.linears[2 * size, size, None] = self._projection

    def __call__(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        rotary: RotaryCosSin,
        backend: AttentionBackend,
        output_tokens: Tensor | None = None,
    ) -> Tensor:
        """Return results [tokens, hidden_size], normed for the head, of token_ids [tokens] at ``positions`` + 1.

        ``hidden`` [tokens, hidden_size] are the states at ``positions``. ``output_tokens`` [kept] selects tokens of the
        result; without any, keys and values are stored.
        """
        assert self._embedding is not None
        embedded = self._parallel.all_reduce(self._embedding(token_ids))
        if self._names.masks_first:
            embedded = embedded.masked_fill((positions == 0)[:, None], 0.0)
        both = [self._embedding_norm(embedded), self._hidden_norm(hidden)]
        start = self._projection.apply(torch.cat(both[:: -1 if self._names.hidden_first else 1], dim=1))
        normed = self._layer.input_norm(start)
        if output_tokens is not None and not len(output_tokens):
            self._layer.attention.store(normed, rotary, backend)
            return start[:0]
        output, residual = self._layer(normed, start, rotary, backend, output_tokens)
        return self._norm.add(output, residual)

    def weight_shards(self) -> WeightShards:
        names = self._names
        outputs = ShardRange.full(self._size)
        inputs = ShardRange.full(2 * self._size)
        for name, norm in self._norms():
            yield f"{name}.weight", norm.weight_shard()
        yield from prefixed(f"{names.projection}.", self._projection.weight_shards(0, outputs, inputs))
        yield from prefixed(names.layer, self._layer.weight_shards())

    def process_weights_after_loading(self) -> None:
        for _, norm in self._norms():
            norm.process_weights_after_loading()
        self._projection.process_weights_after_loading()
        self._layer.process_weights_after_loading()

    def _norms(self) -> tuple[tuple[str, RMSNorm], ...]:
        names = self._names
        return (
            (names.embedding_norm, self._embedding_norm),
            (names.hidden_norm, self._hidden_norm),
            (names.norm, self._norm),
        )
