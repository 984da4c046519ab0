"""Transfer planning: which bytes of a peer's KV cache go where in ours. Pure functions of layouts and block lists.

    a read                 remote blocks  7 8 9 3    →  local blocks  4 5 6 0
    sorted by local block                 3 7 8 9                     0 4 5 6
    runs (adjacent on both sides)         3 | 7 8 9                   0 | 4 5 6
    pieces (posted one by one)            cut wherever one would exceed ``max_bytes``

Both sides store a block as one range of bytes (pdserve/kv.py), so a run of blocks is one range, too.

Only layouts that are equal up to ``num_blocks``, on one rank each, are bridged. Unequal tensor- or pipeline-parallel
sizes and page sizes cut blocks into smaller ranges; that belongs here, behind ``source`` and ``plan_read``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdserve.errors import PeerError
from pdserve.kv import KVLayout
from pdserve.records import KVRead, KVRegion, Peer, RankKV

DEVICES = ("cpu", "cuda")
MAX_BLOCKS = 2**31 - 1  # block ids travel as int32
ADDRESS_SPACE = 2**64  # bytes


class Piece(NamedTuple):
    """Blocks that are posted together: ``remote[i]`` of the peer goes to ``local[i]``. ``local`` ascends."""

    local: NDArray[np.int32]  # [num_blocks] int32, host
    remote: NDArray[np.int32]  # [num_blocks] int32, host
    num_runs: int  # ranges left once adjacent blocks are merged


class Copy(NamedTuple):
    """A range of bytes; offsets count from the start of each side's region."""

    local_offset: int
    remote_offset: int
    num_bytes: int


def check_compatible(local: KVLayout, remote: KVLayout) -> None:
    """Raise PeerError, naming both values, unless blocks of the two layouts are the same bytes."""
    for field in local.__struct_fields__:
        ours, theirs = getattr(local, field), getattr(remote, field)
        if field != "num_blocks" and ours != theirs:
            raise PeerError(f"KV layouts differ in {field}: {ours} here, {theirs} at the peer; start both nodes alike")
    if not 1 <= remote.num_blocks <= MAX_BLOCKS:
        raise PeerError(f"the peer names {remote.num_blocks} blocks; a KV cache has 1 … {MAX_BLOCKS}")


def check_region(region: KVRegion, layout: KVLayout) -> None:
    """Raise PeerError unless every block of ``layout`` lies inside ``region`` and the region inside memory."""
    if region.device not in DEVICES:
        raise PeerError(f"KV memory on device {region.device!r}; known are {', '.join(DEVICES)}")
    if region.device_id < 0:
        raise PeerError(f"KV memory on device number {region.device_id}; it must be at least 0")
    if layout.total_bytes < 1 or layout.total_bytes > region.num_bytes:
        raise PeerError(f"{layout.num_blocks} blocks take {layout.total_bytes} B, the region has {region.num_bytes} B")
    if region.address < 1 or region.address + region.num_bytes > ADDRESS_SPACE:
        raise PeerError(f"a region of {region.num_bytes} B at {region.address:#x} is outside of memory")


def source(local: KVLayout, peer: Peer) -> RankKV:
    """The rank of ``peer`` that holds our blocks. Raises PeerError where the two cannot be bridged."""
    if len(peer.ranks) != 1:
        raise PeerError(f"peer {peer.node_id} has {len(peer.ranks)} ranks, this node 1; only equal numbers are bridged")
    rank = peer.ranks[0]
    check_compatible(local, rank.layout)
    check_region(rank.region, rank.layout)
    return rank


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


def plan_read(read: KVRead, local: KVLayout, remote: KVLayout, max_bytes: int) -> list[Piece]:
    """Pieces of at most ``max_bytes`` (but at least a block) that together make up ``read``.

    Blocks are sorted by local id: these are unique, so whatever can merge ends up side by side. Raises PeerError.
    """
    check_read(read, local.num_blocks, remote.num_blocks)
    local_ids = np.array(read.local_blocks, dtype=np.int32)
    remote_ids = np.array(read.remote_blocks, dtype=np.int32)
    order = np.argsort(local_ids)
    local_ids, remote_ids = local_ids[order], remote_ids[order]
    step = max(1, max_bytes // local.block_bytes)
    return [_piece(local_ids[i : i + step], remote_ids[i : i + step]) for i in range(0, len(order), step)]


def copies(piece: Piece, block_bytes: int) -> Iterator[Copy]:
    """The runs of a piece as ranges of bytes."""
    if not len(piece.local):
        return
    starts = np.concatenate(([0], _breaks(piece.local, piece.remote) + 1, [len(piece.local)])).tolist()
    for start, end in itertools.pairwise(starts):
        first_local, first_remote = int(piece.local[start]), int(piece.remote[start])
        yield Copy(first_local * block_bytes, first_remote * block_bytes, (end - start) * block_bytes)


def _piece(local_ids: NDArray[np.int32], remote_ids: NDArray[np.int32]) -> Piece:
    return Piece(local_ids, remote_ids, len(_breaks(local_ids, remote_ids)) + 1)


def _breaks(local_ids: NDArray[np.int32], remote_ids: NDArray[np.int32]) -> NDArray[np.intp]:
    """Indices after which a new run begins."""
    return np.flatnonzero((np.diff(local_ids) != 1) | (np.diff(remote_ids) != 1))


def _check_ids(side: str, block_ids: Sequence[int], num_blocks: int) -> None:
    # Python integers, before anything is narrowed to int32: an id from a peer must not wrap around.
    if block_ids and not (min(block_ids) >= 0 and max(block_ids) < num_blocks):
        wrong = next(b for b in block_ids if not 0 <= b < num_blocks)
        raise PeerError(f"{side} block {wrong} is outside 0 … {num_blocks - 1}")
