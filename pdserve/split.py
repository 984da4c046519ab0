"""How a node splits a model over its ranks: pipeline stages by layers, and each stage into tensor shards.

                        tensor shards, --tp 2
                        shard 0   shard 1
    stage 0, layers 0…  rank 0    rank 1        rank = stage * tp + shard
    stage 1, layers …n  rank 2    rank 3        rank 0 leads: it runs in the engine process

A rank holds a model of its own, smaller one (``shard_of``): fewer layers, fewer heads, a narrower MLP. The first stage
has the embedding, the last one the norm and the output projection; each shard of these has a run of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.errors import ConfigError
from pdserve.kv import KVShare
from pdserve.model_config import ModelConfig


class Split(msgspec.Struct, frozen=True):
    """``stage_layers[s]`` is the number of layers of pipeline stage s; each stage has ``tp`` tensor shards."""

    stage_layers: tuple[int, ...]
    tp: int = 1

    @property
    def pp(self) -> int:
        return len(self.stage_layers)

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp

    def place(self, rank: int) -> Place:
        assert 0 <= rank < self.num_ranks, f"rank {rank} of {self.num_ranks}"
        return Place(self, *divmod(rank, self.tp))

    def shares(self, num_kv_heads: int) -> tuple[KVShare, ...]:
        """What each rank holds of the KV of a model with ``num_kv_heads`` heads, by rank."""
        places = (self.place(rank) for rank in range(self.num_ranks))
        return tuple(
            KVShare.of_rank(place.stage, self.stage_layers, place.shard, self.tp, num_kv_heads) for place in places
        )


class Place(msgspec.Struct, frozen=True):
    """Where one rank stands."""

    split: Split
    stage: int
    shard: int

    def __str__(self) -> str:
        """For people: "rank 3 (stage 1, shard 1)"."""
        return f"rank {self.rank} (stage {self.stage}, shard {self.shard})"

    @property
    def rank(self) -> int:
        return self.stage * self.split.tp + self.shard

    @property
    def is_first(self) -> bool:
        """Whether this stage begins with token ids."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage ends with logits, and samples."""
        return self.stage == self.split.pp - 1

    @property
    def layers(self) -> range:
        """Of the model, those that are here."""
        first = sum(self.split.stage_layers[: self.stage])
        return range(first, first + self.split.stage_layers[self.stage])


def choose_split(model: ModelConfig, pp: int, tp: int, stage_layers: Sequence[int] | None = None) -> Split:
    """``stage_layers`` overrides a division by count, in which earlier stages get what is left over.

    The last stage computes the logits as well. Raises ConfigError, naming value, limit and remedy.
    """
    if stage_layers is None:
        if not 1 <= pp <= model.num_layers:
            raise ConfigError(f"pp {pp} is not within 1 … {model.num_layers}, the layers of the model")
        each, over = divmod(model.num_layers, pp)
        stage_layers = [each + (stage < over) for stage in range(pp)]
    if len(stage_layers) != pp or min(stage_layers) < 1 or sum(stage_layers) != model.num_layers:
        raise ConfigError(
            f"stage layers {','.join(map(str, stage_layers))} add up to {sum(stage_layers)}; give {pp} numbers of at "
            f"least 1, one for each of pp stages, that add up to the {model.num_layers} layers of the model"
        )
    for what, count in (("attention heads", model.num_heads), ("intermediate_size", model.intermediate_size)):
        if tp < 1 or count % tp:
            raise ConfigError(f"tp {tp} does not divide the model's {what}, {count}; choose a divisor")
    KVShare.of_rank(0, stage_layers, 0, tp, model.num_kv_heads)  # checks the KV heads
    return Split(tuple(stage_layers), tp)


def shard_of(model: ModelConfig, place: Place) -> ModelConfig:
    """What a rank holds, as a model: its layers, its heads, its part of the MLP. The vocabulary stays whole."""
    tp, layers = place.split.tp, place.layers
    return msgspec.structs.replace(
        model,
        num_layers=len(layers),
        num_heads=model.num_heads // tp,
        num_kv_heads=max(1, model.num_kv_heads // tp),
        intermediate_size=model.intermediate_size // tp,
        sliding_windows=model.sliding_windows[layers.start : layers.stop],
    )


def vocabulary_of(model: ModelConfig, place: Place) -> range:
    """The token ids whose rows of embedding and output projection a shard holds; the last shard may hold fewer."""
    each = -(-model.vocab_size // place.split.tp)
    return range(place.shard * each, min((place.shard + 1) * each, model.vocab_size))


def num_parameters(model: ModelConfig, place: Place) -> int:
    """Parameters that a rank holds: of tied models too, the output projection counts beside the embedding."""
    mine = shard_of(model, place)
    attention = mine.hidden_size * mine.head_dim * (2 * mine.num_heads + 2 * mine.num_kv_heads)
    mlp = 3 * mine.hidden_size * mine.intermediate_size
    tables = place.is_first + place.is_last
    return mine.num_layers * (attention + mlp) + tables * len(vocabulary_of(model, place)) * mine.hidden_size
