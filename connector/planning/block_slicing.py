"""Block slicing: which bytes of a remote block go where in a local block. Computed once per pair of ranks.

A page is ``[heads, layers, planes, tokens, head_dim]`` (``KVLayout``), and a block is some consecutive pages. The part
that two ranks have in common splits into byte ranges at each outer axis that is not whole on both sides:

    equal layouts and parts          the block is one range
    the peer has some of our heads   one range per page: heads are the outermost axis
    the peer has some of our layers  one range per page and head
    other page size                  one range per head, layer, plane and run of tokens within one page of both sides
    packed specs                     one range; rank_mapping.py refuses peers with another part or page size

With several KV cache groups (pdserve/kv/groups.py), blocks of each group have their own slices if the two ranks differ
in their layers: a layer's index in a block depends on the other layers of its rank. So do groups of unlike heads.
Several ranks of the peer may hold the same head of a coarse group, for unlike heads of the finest one:

                         rank a    rank b    rank c    rank d
    finest group         0 1       2 3       4 5       6 7        we need 0 … 7: from all four
    a group of 2 heads   0         0         1         1          0 comes from a, which has 0 of the finest, 1 from c
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdserve.kv.layout import KVLayout, KVShare

Offsets = NDArray[np.int64]


class ByteRanges(NamedTuple):
    """``num_bytes[i]`` bytes at ``remote[i]`` of the peer go to ``local[i]``."""

    local: Offsets  # [num_ranges] int64, host
    remote: Offsets  # [num_ranges] int64, host
    num_bytes: Offsets  # [num_ranges] int64, host


class BlockRanges(NamedTuple):
    """The byte ranges that every block of one cache has.

    A descriptor is one range of one block: range r of block b has the number ``r * num_blocks + b``.
    """

    offsets: Offsets  # [num_ranges] int64, host: from the start of a block
    num_bytes: Offsets  # [num_ranges] int64, host
    block_bytes: int
    num_blocks: int

    @classmethod
    def whole(cls, block_bytes: int, num_blocks: int) -> BlockRanges:
        return cls(np.zeros(1, np.int64), np.array([block_bytes], np.int64), block_bytes, num_blocks)

    def starts(self, block_ids: NDArray[np.int32]) -> Offsets:
        """Return where the ranges of these blocks start in the cache. Shape [num_blocks * num_ranges], in bytes."""
        return (block_ids.astype(np.int64)[:, None] * self.block_bytes + self.offsets).ravel()

    def descriptors(self, block_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the descriptor numbers of these blocks, in the order of ``starts``."""
        first = np.arange(len(self.offsets), dtype=np.int32) * np.int32(self.num_blocks)
        return (block_ids[:, None] + first).ravel()


class BlockSlices(NamedTuple):
    """The common part of a local and a remote block: range i of ``local`` receives range i of ``remote``."""

    local: BlockRanges
    remote: BlockRanges

    @property
    def num_ranges(self) -> int:
        return len(self.local.offsets)

    @property
    def num_bytes(self) -> int:
        """Bytes per block."""
        return int(self.local.num_bytes.sum())

    @property
    def contiguous(self) -> bool:
        """Whether the last range of a block touches the first range of the next block, on both sides."""
        return all(
            side.offsets[-1] + side.num_bytes[-1] - side.offsets[0] == side.block_bytes
            for side in (self.local, self.remote)
        )

    def byte_ranges(self, local_ids: NDArray[np.int32], remote_ids: NDArray[np.int32]) -> ByteRanges:
        """Return the merged ranges of pairs of blocks, counted from the start of the caches. ``local_ids`` ascends."""
        num_bytes = np.tile(self.local.num_bytes, len(local_ids))
        return merge(ByteRanges(self.local.starts(local_ids), self.remote.starts(remote_ids), num_bytes))


def slice_blocks(local: KVLayout, ours: KVShare, remote: KVLayout, theirs: KVShare) -> tuple[BlockSlices, ...]:
    """Slice blocks of two ranks that share layers and heads; all but the heads of their spec, and groups, are equal.

    Return the slices of each group's blocks, or one for all blocks. A group without common layers has no ranges.
    """
    if local.spec.packed:
        whole = BlockRanges.whole(local.block_bytes, local.num_blocks)
        return (BlockSlices(whole, BlockRanges.whole(remote.block_bytes, remote.num_blocks)),)
    if local.groups.heads:
        return _slice_unlike_heads(local, ours, remote, theirs)
    if ours.layers == theirs.layers:  # with padding, so that a block stays one range
        every = np.arange(local.num_layers, dtype=np.int64)
        heads = _common(ours.first_head, ours.num_heads, theirs.first_head, theirs.num_heads)
        here = _Side(local, local, every, heads - ours.first_head)
        return (_slice_layers(here, _Side(remote, remote, every, heads - theirs.first_head)),)
    common = range(max(ours.first_layer, theirs.first_layer), min(ours.layers.stop, theirs.layers.stop))
    groups = range(local.groups.num_groups)
    heads = _common(ours.first_head, ours.num_heads, theirs.first_head, theirs.num_heads)
    return tuple(
        _slice_layers(
            _Side(local, local, _indices(local, ours, common, group), heads - ours.first_head),
            _Side(remote, remote, _indices(local, theirs, common, group), heads - theirs.first_head),
        )
        for group in groups
    )


def _slice_unlike_heads(local: KVLayout, ours: KVShare, remote: KVLayout, theirs: KVShare) -> tuple[BlockSlices, ...]:
    """Slice blocks of groups whose heads differ. Ranks of equal parts and pages have equal blocks."""
    if (ours.layers, ours.first_head, ours.num_heads) == (theirs.layers, theirs.first_head, theirs.num_heads) and (
        local.kernel_block_size == remote.kernel_block_size
    ):
        whole = BlockRanges.whole(local.block_bytes, local.num_blocks)
        return (BlockSlices(whole, BlockRanges.whole(remote.block_bytes, remote.num_blocks)),)
    common = range(max(ours.first_layer, theirs.first_layer), min(ours.layers.stop, theirs.layers.stop))
    slices = []
    for group in range(local.groups.num_groups):
        mine = ours.heads_in(local.groups, group)
        finer = local.groups.finer(group)
        # A head comes from the rank that has the first one of the finest heads that stand for it here.
        heads = np.array(
            [
                head
                for head in mine
                if theirs.first_head <= max(ours.first_head, head * finer) < theirs.first_head + theirs.num_heads
            ],
            dtype=np.int64,
        )
        slices.append(
            _slice_layers(
                _Side(local, local.of_group(group), _indices(local, ours, common, group), heads - mine.start),
                _Side(
                    remote,
                    remote.of_group(group),
                    _indices(local, theirs, common, group),
                    heads - theirs.heads_in(local.groups, group).start,
                ),
            )
        )
    return tuple(slices)


def _indices(layout: KVLayout, share: KVShare, layers: range, group: int) -> Offsets:
    """Return where some of a rank's layers are in the blocks of a group."""
    places = zip(share.layers, layout.groups.places(share.layers), strict=True)
    return np.array([index for layer, (its, index) in places if its == group and layer in layers], dtype=np.int64)


class _Side(NamedTuple):
    """The layers and heads of blocks of one group that are sliced, on one side."""

    cache: KVLayout  # layout of all groups, which says how far apart pages lie
    layout: KVLayout  # layout of the group
    layers: Offsets  # indices in a block
    heads: Offsets  # indices in a block


def _slice_layers(ours: _Side, theirs: _Side) -> BlockSlices:
    """Slice blocks for equal layers and heads of both sides."""
    local = ours.cache
    remote = theirs.cache
    pages = [np.arange(0, local.block_size, layout.kernel_block_size) for layout in (local, remote)]
    tokens = np.union1d(*pages)  # first tokens of the runs that are contiguous on both sides
    lengths = np.diff(tokens, append=local.block_size) * ours.layout.spec.row_bytes
    local_offsets = _offsets(ours, tokens)
    remote_offsets = _offsets(theirs, tokens)
    num_bytes = np.broadcast_to(lengths[:, None, None, None], local_offsets.shape)
    ranges = merge(ByteRanges(local_offsets.ravel(), remote_offsets.ravel(), num_bytes.ravel()))
    return BlockSlices(
        BlockRanges(ranges.local, ranges.num_bytes, local.block_bytes, local.num_blocks),
        BlockRanges(ranges.remote, ranges.num_bytes, remote.block_bytes, remote.num_blocks),
    )


def merge(ranges: ByteRanges) -> ByteRanges:
    """Merge neighbours that are adjacent on both sides. The order (block, token, head, layer) brings these together."""
    local, remote, num_bytes = ranges
    if not len(local):
        return ranges
    apart = (local[1:] != local[:-1] + num_bytes[:-1]) | (remote[1:] != remote[:-1] + num_bytes[:-1])
    starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return ByteRanges(local[starts], remote[starts], np.add.reduceat(num_bytes, starts))


def _common(first: int, count: int, other_first: int, other_count: int) -> Offsets:
    return np.arange(max(first, other_first), min(first + count, other_first + other_count), dtype=np.int64)


def _offsets(side: _Side, tokens: Offsets) -> Offsets:
    """Byte offsets in a block of the rows that start at ``tokens``. Shape [tokens, heads, layers, planes]."""
    layout = side.layout
    _, head, layer, plane, token, _ = layout.strides
    elements = (
        (tokens % layout.kernel_block_size * token)[:, None, None, None]
        + (side.heads * head)[:, None, None]
        + (side.layers * layer)[:, None]
        + np.arange(layout.spec.planes, dtype=np.int64) * plane
    )
    pages = tokens // layout.kernel_block_size * side.cache.page_bytes
    return pages[:, None, None, None] + elements * layout.spec.element_bytes
