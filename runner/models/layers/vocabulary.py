"""Both ends of a decoder, token ids to rows and hidden states to logits; each shard has a run of the vocabulary.

All shards have as many rows, so that logits can be gathered; those beyond the end of the vocabulary are zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.config.model_config import ModelConfig
from pdserve.config.parallel import RankPosition, vocabulary_of
from runner.distributed.parallel_state import ParallelState
from runner.loading.weights import TensorShard
from runner.models.layers.linear import Linear
from runner.placement import TensorPlacement


class Embedding:
    def __init__(self, config: ModelConfig, stage: RankPosition, place: TensorPlacement) -> None:
        self._stage, self._dtype = stage, place.dtype
        self._config, self._use_triton = config, place.use_triton
        # Only ever read by row, so it stays as narrow as it came.
        rows = _num_rows(config, stage)
        self.weight = torch.zeros(rows, config.hidden_size, device=place.device, dtype=place.stored)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """This shard's part of [tokens, hidden_size] for input_ids [tokens]: zeros where another shard has the row."""
        if self._stage.split.tp == 1:
            return F.embedding(input_ids, self.weight).to(self._dtype)
        here = vocabulary_of(self._config, self._stage)
        if self._use_triton:
            from runner.kernels.embedding import embed

            return embed(input_ids, self.weight, here.start, len(here), self._dtype)
        rows = input_ids - here.start
        elsewhere = (rows < 0) | (rows >= len(here))
        found = F.embedding(rows.masked_fill_(elsewhere, 0), self.weight).to(self._dtype)
        return found.masked_fill_(elsewhere[:, None], 0.0)

    def part(self) -> TensorShard:
        return _part(self.weight, self._config, self._stage)


class OutputProjection:
    def __init__(self, config: ModelConfig, world: ParallelState, place: TensorPlacement) -> None:
        self._world, self._dtype = world, place.dtype
        self._config = config
        self._linear = Linear(config.hidden_size, _num_rows(config, world.place), False, place)
        self._linear.weight[len(vocabulary_of(config, world.place)) :].zero_()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab_size], the same on all shards, of hidden states [rows, hidden_size]."""
        return self._world.gather_vocabulary(self._linear(hidden), self._config.vocab_size)

    def write(self, hidden: Tensor, out: Tensor) -> None:
        """Logits into ``out`` [rows, vocab_size], on GPUs."""
        if self._world.place.split.tp == 1:
            self._linear.write(hidden, out)
        else:
            self._world.gather_vocabulary(self._linear(hidden), self._config.vocab_size, out)

    def part(self) -> TensorShard:
        return _part(self._linear.weight, self._config, self._world.place)

    def tie(self, embedding: Embedding) -> None:
        """Take over the filled embedding; on GPUs that compute in its dtype, its memory too."""
        weight = embedding.weight
        if weight.dtype == self._dtype and weight.device.type != "cpu":
            self._linear.weight = weight
        else:
            self._linear.weight.copy_(weight)

    def seal(self) -> None:
        self._linear.seal()


def _num_rows(config: ModelConfig, place: RankPosition) -> int:
    """Rows of every shard: as many as the first one has, which lacks none."""
    return -(-config.vocab_size // place.split.tp)


def _part(memory: Tensor, config: ModelConfig, place: RankPosition) -> TensorShard:
    """Of the whole table the rows that a shard has in ``memory``."""
    here = vocabulary_of(config, place)
    return TensorShard(memory[: len(here)], (config.vocab_size, config.hidden_size), 0, here.start)
