"""Embedding and output projection; each tensor shard has a range of the vocabulary.

All shards have as many rows, so that logits can be gathered; rows beyond the end of the vocabulary are zeros.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.config.parallel import RankPosition, vocabulary_of
from pdserve.model.model_config import ModelConfig
from runner.models.layers.context import ModelContext
from runner.models.layers.weight_shard import ShardRange, WeightShard, WeightShards
from runner.models.quantization.unquantized import UnquantizedLinearMethod


class VocabParallelEmbedding:
    def __init__(self, context: ModelContext) -> None:
        config = context.config
        placement = context.placement
        self._config = config
        self._position = context.position
        self._dtype = placement.dtype
        self._use_triton = placement.use_triton
        # Rows are only copied, never multiplied, so they stay as narrow as stored.
        rows = _rows_per_shard(config, context.position)
        self.weight = torch.zeros(rows, config.hidden_size, device=placement.device, dtype=placement.stored)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Return this shard's part of [tokens, hidden_size]: zeros where another shard has the row."""
        if self._position.parallel.tp == 1:
            return F.embedding(input_ids, self.weight).to(self._dtype)
        held = vocabulary_of(self._config, self._position)
        if self._use_triton:
            from runner.kernels.embedding import embed

            return embed(input_ids, self.weight, held.start, len(held), self._dtype)
        rows = input_ids - held.start
        missing = (rows < 0) | (rows >= len(held))
        embedded = F.embedding(rows.masked_fill_(missing, 0), self.weight).to(self._dtype)
        return embedded.masked_fill_(missing[:, None], 0.0)

    def weight_shard(self) -> WeightShard:
        return _weight_shard(self.weight, self._config, self._position)


class ParallelLMHead:
    def __init__(self, context: ModelContext) -> None:
        config = context.config
        self._config = config
        self._parallel = context.parallel
        self._position = context.position
        self._dtype = context.placement.dtype
        rows = _rows_per_shard(config, self._position)
        self._plain: UnquantizedLinearMethod | None = None
        if config.head_form is None:
            self._plain = UnquantizedLinearMethod(config.hidden_size, rows, False, context.placement)
            self._plain.weight[len(vocabulary_of(config, self._position)) :].zero_()
        self._linear = self._plain or context.quantized_linear(config.hidden_size, rows, config.head_form)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits [rows, vocab_size], the same on all shards, of hidden states [rows, hidden_size]."""
        return self._parallel.gather_columns(self._linear.apply(hidden), self._config.vocab_size)

    def write(self, hidden: Tensor, out: Tensor) -> None:
        """Write logits to ``out`` [rows, vocab_size]."""
        if self._plain is not None and self._position.parallel.tp == 1 and out.is_cuda:  # CPUs have packed the weight
            self._plain.apply_into(hidden, out)
        else:
            self._parallel.gather_columns(self._linear.apply(hidden), self._config.vocab_size, out)

    def weight_shards(self) -> WeightShards:
        """Yield the tensors of the projection, named behind "lm_head."."""
        if self._plain is not None:
            shard = _weight_shard(self._plain.weight, self._config, self._position)
            yield "weight", replace(shard, restore=self._plain.restore_weights)
            return
        held = vocabulary_of(self._config, self._position)
        outputs = ShardRange(held.start, len(held), self._config.vocab_size)
        yield from self._linear.weight_shards(0, outputs, ShardRange.full(self._config.hidden_size))

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Use the filled embedding's weight; on GPUs that compute in its dtype, share its memory."""
        weight = embedding.weight
        assert self._plain is not None
        if weight.dtype == self._dtype and weight.device.type != "cpu":
            self._plain.weight = weight
        else:
            self._plain.restore_weights()
            self._plain.weight.copy_(weight)

    def copy_to(self, embedding: VocabParallelEmbedding) -> None:
        """Copy the filled weight to the embedding of a model that ties both."""
        assert self._plain is not None
        embedding.weight.copy_(self._plain.weight)

    def process_weights_after_loading(self) -> None:
        self._linear.process_weights_after_loading()


def _rows_per_shard(config: ModelConfig, position: RankPosition) -> int:
    """Return the rows of every shard: as many as the first shard needs."""
    return -(-config.vocab_size // position.parallel.tp)


def _weight_shard(memory: Tensor, config: ModelConfig, position: RankPosition) -> WeightShard:
    held = vocabulary_of(config, position)
    return WeightShard(memory[: len(held)], (config.vocab_size, config.hidden_size), 0, held.start)
