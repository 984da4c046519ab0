"""Loads the weights of one rank's model: what LoadedModel asks for, whichever model it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

from runner.loading.stored_weights import StoredWeights
from runner.loading.weights import OpenWeights
from runner.models.layers.weight_shard import WeightGroup, WeightShard, WeightShards

Progress = Callable[[float], None]


class ModelWeights(ABC):
    """The base has the answers for a model whose tensors are not known one by one."""

    #: Whether each tensor is known by its name in the checkpoint. Only then peers and patches are possible.
    by_name = False

    @abstractmethod
    def check(self, model_dir: Path, weights: OpenWeights) -> None:
        """Raise CheckpointError unless each tensor of a checkpoint has its place in the model. Read none."""

    @abstractmethod
    def load(
        self, model_dir: Path, weights: OpenWeights, progress: Progress | None, at_once: int
    ) -> StoredWeights | None:
        """Fill the weights in place, ``at_once`` values at a time. Raises CheckpointError.

        Return where the checkpoint's tensors are in the model, None unless ``by_name``.
        """

    @abstractmethod
    def load_random(self, model_dir: Path) -> None:
        """Fill the weights with values that depend on names and shapes only."""

    def shards(self) -> WeightShards:
        """Yield this rank's part of each of the checkpoint's tensors, by the checkpoint's name."""
        return iter(list[tuple[str, WeightShard]]())

    def groups(self) -> Iterator[WeightGroup]:
        """Yield the tensors in groups of at most a layer; packing one needs memory for the group, not for the model."""
        return iter(list[WeightGroup]())
