"""The part of a checkpoint's tensor that a rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from pdserve.config.parallel import RankPosition


class ShardRange(NamedTuple):
    """A shard's consecutive rows or columns of a weight."""

    start: int
    size: int
    full_size: int  # of all shards

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

    The part begins at ``start`` of dimension ``dim`` and is as long there as ``memory`` is.
    """

    memory: Tensor
    full_shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    order: Tensor | None = None  # of the rows of each head in memory, on the CPU; None: that of the full tensor

    @classmethod
    def full(cls, memory: Tensor) -> WeightShard:
        return cls(memory, tuple(memory.shape))

    @property
    def index(self) -> tuple[slice, ...]:
        """Index of the part in the full tensor."""
        return (slice(None),) * self.dim + (slice(self.start, self.start + self.memory.shape[self.dim]),)

    def part_of(self, full: Any) -> Tensor:
        """Return what ``memory`` holds of a full tensor or slice of safetensors."""
        part: Tensor = full[self.index]
        if self.order is None:
            return part
        heads = part.reshape(-1, len(self.order), *part.shape[1:])
        return heads[:, self.order.to(part.device)].reshape(part.shape)


WeightShards = Iterator[tuple[str, WeightShard]]  # with the tensor's name in the checkpoint


def prefixed(prefix: str, shards: WeightShards) -> WeightShards:
    """Yield the shards with ``prefix`` before each name."""
    return ((prefix + name, shard) for name, shard in shards)
