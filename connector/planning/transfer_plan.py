"""Transfer planning: which bytes of a peer's KV cache go where in ours. Pure functions of layouts and block lists.

    once per peer     its ranks that we need, and for each     bridge.py
                      the cut of a block into ranges           cut.py
    once per read     blocks, sorted and in pieces             here

    a read                 remote blocks  7 8 9 3    →  local blocks  4 5 6 0
    sorted by local block                 3 7 8 9                     0 4 5 6
    runs (adjacent on both sides)         3 | 7 8 9                   0 | 4 5 6
    pieces (posted one by one)            cut wherever one would exceed ``max_bytes``

Between ranks that hold the same, a block is one range of bytes, and so is a run of blocks. Else each block is as many
ranges as its cut has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from connector.planning.block_slicing import Cut
from pdserve.errors import PeerError
from pdserve.records import KVRead


class ByteRangeRead(NamedTuple):
    """Blocks that are posted together: ``remote[i]`` of the peer goes to ``local[i]``. ``local`` ascends."""

    local: NDArray[np.int32]  # [num_blocks] int32, host
    remote: NDArray[np.int32]  # [num_blocks] int32, host
    num_runs: int  # ranges left once adjacent ones are merged


def check_read(read: KVRead, num_local: int, num_remote: int) -> None:
    """Raise PeerError unless both block lists are of one length and inside their caches, each local block once."""
    if len(read.local_blocks) != len(read.remote_blocks):
        raise PeerError(
            f"read {read.read_id}: {len(read.remote_blocks)} remote for {len(read.local_blocks)} local blocks"
        )
    _check_ids("remote", read.remote_blocks, num_remote)
    _check_ids("local", read.local_blocks, num_local)
    if len(set(read.local_blocks)) != len(read.local_blocks):
        raise PeerError(f"read {read.read_id} names a local block twice")


def plan_read(read: KVRead, cut: Cut, max_bytes: int) -> list[ByteRangeRead]:
    """Pieces of at most ``max_bytes`` (but at least a block) that together are what ``read`` wants of one rank.

    Blocks are sorted by local id: these are unique, so whatever can merge ends up side by side. Raises PeerError.
    """
    check_read(read, cut.local.num_blocks, cut.remote.num_blocks)
    local_ids = np.array(read.local_blocks, dtype=np.int32)
    remote_ids = np.array(read.remote_blocks, dtype=np.int32)
    order = np.argsort(local_ids)
    local_ids, remote_ids = local_ids[order], remote_ids[order]
    seams = _seams(cut, local_ids, remote_ids)
    step = max(1, max_bytes // cut.num_bytes)
    pieces = []
    for start in range(0, len(order), step):
        end = min(start + step, len(order))
        num_runs = (end - start) * cut.num_ranges - (seams[end - 1] - seams[start])
        pieces.append(ByteRangeRead(local_ids[start:end], remote_ids[start:end], num_runs))
    return pieces


def _seams(cut: Cut, local_ids: NDArray[np.int32], remote_ids: NDArray[np.int32]) -> list[int]:
    """How many of the blocks up to each one merge with the block before them. Shape [num_blocks]."""
    if not cut.seamless:
        return [0] * len(local_ids)
    merged = (np.diff(local_ids) == 1) & (np.diff(remote_ids) == 1)
    return [0, *np.cumsum(merged).tolist()]


def _check_ids(side: str, block_ids: Sequence[int], num_blocks: int) -> None:
    # Python integers, before anything is narrowed to int32: an id from a peer must not wrap around.
    if block_ids and not (min(block_ids) >= 0 and max(block_ids) < num_blocks):
        wrong = next(b for b in block_ids if not 0 <= b < num_blocks)
        raise PeerError(f"{side} block {wrong} is outside 0 … {num_blocks - 1}")
