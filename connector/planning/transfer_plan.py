"""Transfer planning: which blocks of a peer's KV cache go where, in chunks. Pure functions of layouts and block lists.

    once per peer     its source ranks, and the slices of a block for each     rank_mapping.py, block_slicing.py
    once per read     blocks, sorted and in chunks                             here

    a read                 remote blocks  7 8 9 3    →  local blocks  4 5 6 0
    sorted by local block                 3 7 8 9                     0 4 5 6
    runs (adjacent on both sides)         3 | 7 8 9                   0 | 4 5 6
    chunks (posted one by one)            at most ``max_bytes`` each

Between ranks with equal parts and pages, a block is one byte range, and so is a run of blocks. Otherwise each block has
as many ranges as its slices. With slices by KV cache group, a chunk has blocks of one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from connector.planning.block_slicing import BlockSlices
from connector.planning.read_checks import check_read
from pdserve.records import KVRead


class ReadChunk(NamedTuple):
    """Blocks that are posted together: ``remote[i]`` of the peer goes to ``local[i]``. ``local`` ascends."""

    local: NDArray[np.int32]  # [num_blocks] int32, host
    remote: NDArray[np.int32]  # [num_blocks] int32, host
    num_ranges: int  # byte ranges after merging adjacent ones
    number: int  # index in the rank's slices

    def num_bytes(self, slices: Sequence[BlockSlices]) -> int:
        return len(self.local) * slices[self.number].num_bytes


def plan_read(read: KVRead, slices: Sequence[BlockSlices], max_bytes: int) -> list[ReadChunk]:
    """Split ``read`` from one rank into chunks of at most ``max_bytes``, but at least one block. Raises PeerError.

    ``slices`` are the rank's: one for all blocks, or one per KV cache group.
    """
    check_read(read, slices[0].local.num_blocks, slices[0].remote.num_blocks)
    local_ids = np.array(read.local_blocks, dtype=np.int32)
    remote_ids = np.array(read.remote_blocks, dtype=np.int32)
    if len(slices) == 1:
        return _plan_blocks(0, slices[0], local_ids, remote_ids, max_bytes)
    groups = np.array(read.groups, dtype=np.int32)
    assert len(groups) == len(local_ids), "a read names the group of each block"
    chunks: list[ReadChunk] = []
    for group, group_slices in enumerate(slices):
        if group_slices.num_ranges:  # else the rank has no layers of this group
            mask = groups == group
            chunks += _plan_blocks(group, group_slices, local_ids[mask], remote_ids[mask], max_bytes)
    return chunks


def _plan_blocks(
    number: int, slices: BlockSlices, local_ids: NDArray[np.int32], remote_ids: NDArray[np.int32], max_bytes: int
) -> list[ReadChunk]:
    """Plan blocks with equal slices.

    Blocks are sorted by local id. These are unique, so all ranges that can merge become neighbours.
    """
    order = np.argsort(local_ids)
    local_ids = local_ids[order]
    remote_ids = remote_ids[order]
    merges = _count_merges(slices, local_ids, remote_ids)
    step = max(1, max_bytes // slices.num_bytes)
    chunks = []
    for start in range(0, len(order), step):
        end = min(start + step, len(order))
        num_ranges = (end - start) * slices.num_ranges - (merges[end - 1] - merges[start])
        chunks.append(ReadChunk(local_ids[start:end], remote_ids[start:end], num_ranges, number))
    return chunks


def _count_merges(slices: BlockSlices, local_ids: NDArray[np.int32], remote_ids: NDArray[np.int32]) -> list[int]:
    """Return how many blocks up to each one merge with the block before them. Shape [num_blocks]."""
    if not slices.contiguous:
        return [0] * len(local_ids)
    merged = (np.diff(local_ids) == 1) & (np.diff(remote_ids) == 1)
    return [0, *np.cumsum(merged).tolist()]
