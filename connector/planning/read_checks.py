"""Checks of a read before it is planned: its lists of blocks come from a peer."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.errors import PeerError
from pdserve.records import KVRead


def check_read(read: KVRead, num_local: int, num_remote: int) -> None:
    """Raise PeerError unless both lists have one length, lie inside their caches and name each local block once."""
    if len(read.local_blocks) != len(read.remote_blocks):
        raise PeerError(
            f"read {read.read_id}: {len(read.remote_blocks)} remote for {len(read.local_blocks)} local blocks"
        )
    _check_ids("remote", read.remote_blocks, num_remote)
    _check_ids("local", read.local_blocks, num_local)
    if len(set(read.local_blocks)) != len(read.local_blocks):
        raise PeerError(f"read {read.read_id} names a local block twice")


def _check_ids(side: str, block_ids: Sequence[int], num_blocks: int) -> None:
    # Compare Python integers: an id from a peer must not wrap around in int32.
    if block_ids and not (min(block_ids) >= 0 and max(block_ids) < num_blocks):
        wrong = next(b for b in block_ids if not 0 <= b < num_blocks)
        raise PeerError(f"{side} block {wrong} is outside 0 … {num_blocks - 1}")
