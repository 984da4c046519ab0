"""Matrix products that the tensor shards of a stage share, and which part of the checkpoint's weights each needs.

column parallel   each shard computes a run of the outputs, from all inputs
row parallel      each shard has a run of the inputs; the shards' results are still to be added up
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pdserve.config.parallel import RankPosition
from runner.loading.weights import TensorShard
from runner.models.layers.linear import Linear
from runner.placement import TensorPlacement

Parts = Iterator[tuple[str, TensorShard]]  # by name in the checkpoint


class WeightRange(NamedTuple):
    """What a shard has of a dimension."""

    size: int
    whole: int
    start: int

    @classmethod
    def of_shard(cls, whole: int, place: RankPosition) -> WeightRange:
        """An even division."""
        size = whole // place.split.tp
        return cls(size, whole, place.shard * size)


class ColumnParallel:
    """Products of the same inputs in one: ``runs`` has their outputs by the names that the checkpoint gives them."""

    def __init__(self, in_features: int, runs: dict[str, WeightRange], bias: bool, place: TensorPlacement) -> None:
        self._runs = runs
        self._linear = Linear(in_features, sum(run.size for run in runs.values()), bias, place)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] → [tokens, sum of the runs]."""
        return self._linear(x)

    def parts(self) -> Parts:
        sizes = [run.size for run in self._runs.values()]
        weight, bias = self._linear.weight, self._linear.bias
        for (name, run), memory in zip(self._runs.items(), torch.split(weight, sizes), strict=True):
            yield f"{name}.weight", TensorShard(memory, (run.whole, weight.shape[1]), 0, run.start)
        if bias is not None:
            for (name, run), memory in zip(self._runs.items(), torch.split(bias, sizes), strict=True):
                yield f"{name}.bias", TensorShard(memory, (run.whole,), 0, run.start)

    def seal(self) -> None:
        self._linear.seal()


class RowParallel:
    def __init__(
        self, name: str, run: WeightRange, out_features: int, bias: bool, stage: RankPosition, place: TensorPlacement
    ) -> None:
        self._name, self._run, self._stage = name, run, stage
        self._linear = Linear(run.size, out_features, bias, place)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, size of the run] → this shard's part of [tokens, out_features]; the norm that follows sums them."""
        return self._linear(x)

    def parts(self) -> Parts:
        weight, bias = self._linear.weight, self._linear.bias
        yield f"{self._name}.weight", TensorShard(weight, (weight.shape[0], self._run.whole), 1, self._run.start)
        if bias is not None:
            yield f"{self._name}.bias", TensorShard.whole(bias)

    def seal(self) -> None:
        if self._linear.bias is not None and self._stage.shard > 0:
            self._linear.bias.zero_()  # the sum shall have it once
        self._linear.seal()
