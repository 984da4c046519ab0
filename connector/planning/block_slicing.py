"""Which bytes of a remote block go where in a local one. The same for every pair of blocks, so worked out once.

A page is ``[heads, layers, 2, tokens, head_dim]`` (pdserve/kv.py), and a block a few of them. What two ranks both hold
is therefore cut into ranges wherever an outer axis is not whole on both sides:

    both alike                       the block is one range
    the peer has some of our heads   a range per page: heads are the outermost axis, so they stay together
    the peer has some of our layers  a range per page and head
    pages of another size            a range per head, layer, K or V, and run of tokens that no page ends in
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdserve.kv import DTYPE_BYTES, KVLayout, KVShare

Offsets = NDArray[np.int64]


class Ranges(NamedTuple):
    """``num_bytes[i]`` bytes at ``remote[i]`` of the peer go to ``local[i]``."""

    local: Offsets  # [num_ranges] int64, host
    remote: Offsets  # [num_ranges] int64, host
    num_bytes: Offsets  # [num_ranges] int64, host


class Side(NamedTuple):
    """Ranges of bytes that every block of a cache has alike.

    A descriptor is one range of one block; that of range r of block b has number ``r * num_blocks + b``.
    """

    offsets: Offsets  # [num_ranges] int64, host: from the start of a block
    num_bytes: Offsets  # [num_ranges] int64, host
    block_bytes: int
    num_blocks: int

    @classmethod
    def whole(cls, block_bytes: int, num_blocks: int) -> Side:
        """Blocks in one range each."""
        return cls(np.zeros(1, np.int64), np.array([block_bytes], np.int64), block_bytes, num_blocks)

    def starts(self, block_ids: NDArray[np.int32]) -> Offsets:
        """Where the ranges of these blocks begin, from the start of the cache. Shape [num_blocks * num_ranges]."""
        return (block_ids.astype(np.int64)[:, None] * self.block_bytes + self.offsets).ravel()

    def descriptors(self, block_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Numbers of the descriptors of these blocks, in the order of ``starts``."""
        first = np.arange(len(self.offsets), dtype=np.int32) * np.int32(self.num_blocks)
        return (block_ids[:, None] + first).ravel()


class Cut(NamedTuple):
    """What a block of a peer and a block of ours have in common: range i here is range i there."""

    local: Side
    remote: Side

    @property
    def num_ranges(self) -> int:
        """In a block."""
        return len(self.local.offsets)

    @property
    def num_bytes(self) -> int:
        """In a block."""
        return int(self.local.num_bytes.sum())

    @property
    def seamless(self) -> bool:
        """Whether the last range of a block borders on the first of the next block, on both sides."""
        return all(
            side.offsets[-1] + side.num_bytes[-1] - side.offsets[0] == side.block_bytes
            for side in (self.local, self.remote)
        )

    def place(self, local_ids: NDArray[np.int32], remote_ids: NDArray[np.int32]) -> Ranges:
        """The ranges of pairs of blocks, merged; offsets count from the start of the caches. ``local_ids`` ascends."""
        num_bytes = np.tile(self.local.num_bytes, len(local_ids))
        return merge(Ranges(self.local.starts(local_ids), self.remote.starts(remote_ids), num_bytes))


def cut_blocks(local: KVLayout, ours: KVShare, remote: KVLayout, theirs: KVShare) -> Cut:
    """The cut between two ranks that have layers and heads in common, of layouts with equal blocks and rows."""
    heads = _common(ours.first_head, ours.num_heads, theirs.first_head, theirs.num_heads)
    layers = _common(ours.first_layer, ours.num_layers, theirs.first_layer, theirs.num_layers)
    pages = [np.arange(0, local.block_size, layout.kernel_block_size) for layout in (local, remote)]
    tokens = np.union1d(*pages)  # where runs of tokens begin that are adjacent on both sides
    lengths = np.diff(tokens, append=local.block_size) * _row_bytes(local)
    ours_at = _offsets(local, tokens, heads - ours.first_head, layers - ours.first_layer)
    theirs_at = _offsets(remote, tokens, heads - theirs.first_head, layers - theirs.first_layer)
    num_bytes = np.broadcast_to(lengths[:, None, None, None], ours_at.shape)
    ranges = merge(Ranges(ours_at.ravel(), theirs_at.ravel(), num_bytes.ravel()))
    return Cut(
        Side(ranges.local, ranges.num_bytes, local.block_bytes, local.num_blocks),
        Side(ranges.remote, ranges.num_bytes, remote.block_bytes, remote.num_blocks),
    )


def merge(ranges: Ranges) -> Ranges:
    """The same bytes in as few ranges as possible.

    They come in the order of blocks, tokens, heads, layers: in it, those adjacent on both sides are neighbours.
    """
    local, remote, num_bytes = ranges
    if not len(local):
        return ranges
    apart = (local[1:] != local[:-1] + num_bytes[:-1]) | (remote[1:] != remote[:-1] + num_bytes[:-1])
    starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return Ranges(local[starts], remote[starts], np.add.reduceat(num_bytes, starts))


def _common(first: int, count: int, other_first: int, other_count: int) -> Offsets:
    return np.arange(max(first, other_first), min(first + count, other_first + other_count), dtype=np.int64)


def _row_bytes(layout: KVLayout) -> int:
    """Of one token in one head of one layer, K or V."""
    return layout.head_dim * DTYPE_BYTES[layout.dtype]


def _offsets(layout: KVLayout, tokens: Offsets, heads: Offsets, layers: Offsets) -> Offsets:
    """Where in a block the rows that begin at ``tokens`` are. Shape [tokens, heads, layers, 2], in bytes."""
    page, head, layer, side, token, _ = layout.strides
    in_page = tokens // layout.kernel_block_size * page + tokens % layout.kernel_block_size * token
    elements = (
        in_page[:, None, None, None]
        + (heads * head)[:, None, None]
        + (layers * layer)[:, None]
        + np.arange(2, dtype=np.int64) * side
    )
    return elements * DTYPE_BYTES[layout.dtype]
