"""The part of a checkpoint's tensor that a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdserve.config.parallel import RankPosition


class ShardRange(NamedTuple):
    """A shard's consecutive rows or columns of a weight."""

    start: int
    size: int
    full_size: int  # rows or columns of all shards

    @classmethod
    def even(cls, full_size: int, position: RankPosition) -> ShardRange:
        """Divide evenly over the tensor shards."""
        size = full_size // position.parallel.tp
        return cls(position.shard * size, size, full_size)

    @classmethod
    def full(cls, size: int) -> ShardRange:
        return cls(0, size, size)


@dataclass(frozen=True)
class WeightShard:
    """Memory for a rank's part of one tensor: a range of dimension ``dim``, all of the other dimensions.

    The part begins at ``start`` of dimension ``dim`` and is as long there as ``memory`` is. With ``rows`` it is instead
    these rows of the full tensor, in this order.
    """

    memory: Tensor
    full_shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    order: Tensor | None = None  # order of each head's rows in memory, on the CPU; None: as in the full tensor
    rows: Tensor | None = None  # [rows of memory] int64, on the CPU
    restore: Callable[[], None] | None = None  # unpacks the weights of the layer, if ``memory`` is meta

    @classmethod
    def full(cls, memory: Tensor) -> WeightShard:
        return cls(memory, tuple(memory.shape))

    @classmethod
    def of_ranges(
        cls, memory: Tensor, ranges: Sequence[ShardRange], restore: Callable[[], None] | None = None
    ) -> WeightShard:
        """``ranges``: one per dimension, of which at most one is a part."""
        dim = next((dim for dim, part in enumerate(ranges) if part.size < part.full_size), 0)
        full_shape = tuple(part.full_size for part in ranges)
        return cls(memory, full_shape, dim, ranges[dim].start, restore=restore)

    @property
    def index(self) -> tuple[slice, ...]:
        """Index of the part in the full tensor, without ``rows``."""
        assert self.rows is None
        return self._index(0, self.memory.shape[0])

    def part_of(self, full: Any) -> Tensor:
        """Return what ``memory`` holds of a full tensor or slice of safetensors."""
        if self.rows is None:
            return self._in_order(full[self.index])
        return torch.cat([full[(slice(first, first + count),)] for _, first, count in row_runs(self.rows)])

    @property
    def is_whole(self) -> bool:
        """Whether memory is the full tensor, in its order."""
        return self.order is None and self.rows is None and self.memory.shape == self.full_shape

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """The runs of consecutive rows of the full tensor: index in ``memory``, row of the full tensor, length."""
        assert not self.dim
        if self.rows is not None:
            return row_runs(self.rows)
        if self.order is None:
            return [(0, self.start, len(self.memory))]
        return row_runs(self._in_order(torch.arange(self.start, self.start + len(self.memory))))

    def pieces_of(self, full: Any, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows of ``memory`` and what they hold of a full tensor; about ``most`` values of it at a time."""
        if not self.memory.dim():
            yield self.memory, full[()]
            return
        num_rows = self.memory.shape[0]
        unit = 1 if self.order is None else len(self.order)
        height = max(1, most // max(1, prod(self.full_shape[1:])) // unit) * unit
        if self.rows is not None:
            for at, row, count in row_runs(self.rows):
                for first in range(0, count, height):
                    size = min(height, count - first)
                    yield self.memory[at + first : at + first + size], full[(slice(row + first, row + first + size),)]
            return
        for first in range(0, num_rows, height):
            end = min(first + height, num_rows)
            yield self.memory[first:end], self._in_order(full[self._index(first, end)])

    def _index(self, first: int, end: int) -> tuple[slice, ...]:
        """Return the index of rows of ``memory`` in the full tensor."""
        if self.dim == 0:
            return (slice(self.start + first, self.start + end),)
        columns = slice(self.start, self.start + self.memory.shape[self.dim])
        return (slice(first, end), *(slice(None),) * (self.dim - 1), columns)

    def _in_order(self, part: Tensor) -> Tensor:
        if self.order is None:
            return part
        heads = part.reshape(-1, len(self.order), *part.shape[1:])
        return heads[:, self.order.to(part.device)].reshape(part.shape)


@dataclass(frozen=True)
class AdapterPlace(WeightShard):
    """Where a shard's adapters change one projection. ``memory`` [outputs, inputs] is meta: only its shape counts.

    It is yielded beside the projection's weights, so that it has their ranges and orders. No checkpoint has a tensor of
    this name.
    """

    linear: int = 0  # number of the linear layer on this rank
    member: int = 0  # number of the projection in it

    def shares_of(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return this shard's parts of A [rank, in_features] and B [out_features, rank]."""
        if self.dim == 1:
            return a[:, self.start : self.start + self.memory.shape[1]], b
        return a, self.part_of(b)


def row_runs(rows: Tensor) -> list[tuple[int, int, int]]:
    """Return the runs of consecutive numbers in ``rows``: index in it, first number, length."""
    begins = [0, *(1 + (rows.diff() != 1).nonzero().flatten()).tolist(), len(rows)]
    return [(begin, int(rows[begin]), end - begin) for begin, end in pairwise(begins) if begin < end]


WeightShards = Iterator[tuple[str, WeightShard]]  # with the tensor's name in the checkpoint


class WeightGroup(NamedTuple):
    """Tensors that are filled together and then processed, such as a layer's."""

    shards: Callable[[], WeightShards]
    process: Callable[[], None]  # brings filled tensors into the form that the model computes with

    def refill(self, fill: Callable[[Mapping[str, WeightShard]], None]) -> None:
        """Unpack what processing has packed, ``fill`` the shards, which have their old values, and process them again.

        ``fill`` keeps no shard: its memory is free once it is packed.
        """
        self._restore()
        fill(dict(self.shards()))
        self.process()

    def _restore(self) -> None:
        """Unpack packed tensors. Stages between the others have no embedding and no head: no shards in their group."""
        for _, shard in self.shards():
            if shard.memory.is_meta:
                assert shard.restore is not None
                shard.restore()


def prefixed(prefix: str, shards: WeightShards) -> WeightShards:
    """Yield the shards with ``prefix`` before each name."""
    return ((prefix + name, shard) for name, shard in shards)
