"""Transfer planning between caches with equal blocks. Unequal ones are in test_rank_mapping.py."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.planning.block_slicing import BlockSlices, slice_blocks
from connector.planning.regions import check_region
from connector.planning.transfer_plan import plan_read
from pdserve.errors import PeerError
from pdserve.kv.layout import FullAttentionSpec, KVLayout, KVRegion, KVShare
from pdserve.records import KVRead

LAYOUT = KVLayout(
    num_blocks=40, block_size=4, kernel_block_size=2, num_layers=1, spec=FullAttentionSpec(1, 1, "float16")
)
BLOCK = LAYOUT.block_bytes  # 16 B


def layout(**changes: object) -> KVLayout:
    return msgspec.structs.replace(LAYOUT, **changes)


def read_of(pairs: list[tuple[int, int]]) -> KVRead:
    return KVRead(7, "epoch", tuple(local for local, _ in pairs), tuple(remote for _, remote in pairs))


@st.composite
def reads(draw: st.DrawFn) -> tuple[KVRead, KVLayout, KVLayout]:
    """Runs of adjacent blocks and single blocks, in any order, on caches of different size."""
    ours, theirs = (layout(num_blocks=draw(st.integers(1, 40))) for _ in range(2))
    free = set(range(ours.num_blocks))
    pairs: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(0, 8))):
        local = draw(st.integers(0, ours.num_blocks - 1))
        remote = draw(st.integers(0, theirs.num_blocks - 1))
        for step in range(draw(st.integers(1, 8))):
            if local + step in free and remote + step < theirs.num_blocks:
                free.discard(local + step)
                pairs.append((local + step, remote + step))
    return read_of(draw(st.permutations(pairs))), ours, theirs


class Copy(NamedTuple):
    local_offset: int
    remote_offset: int
    num_bytes: int


def whole(ours: KVLayout, theirs: KVLayout) -> tuple[BlockSlices, ...]:
    return slice_blocks(ours, KVShare.whole(ours), theirs, KVShare.whole(theirs))


def planned(read: KVRead, ours: KVLayout, theirs: KVLayout, max_bytes: int) -> list[list[Copy]]:
    """The byte ranges of each chunk."""
    slices = whole(ours, theirs)
    placed = [slices[0].byte_ranges(chunk.local, chunk.remote) for chunk in plan_read(read, slices, max_bytes)]
    return [[Copy(*row) for row in np.stack(ranges, axis=1).tolist()] for ranges in placed]


@given(reads(), st.integers(1, 6 * BLOCK))
def test_each_wanted_byte_lands_once_and_no_other_byte_does(
    case: tuple[KVRead, KVLayout, KVLayout], max_bytes: int
) -> None:
    read, ours, theirs = case
    remote = np.arange(theirs.total_bytes, dtype=np.int64)
    local = np.full(ours.total_bytes, -1, dtype=np.int64)
    for copy in (copy for chunk in planned(read, ours, theirs, max_bytes) for copy in chunk):
        target = local[copy.local_offset : copy.local_offset + copy.num_bytes]
        assert (target == -1).all()
        target[:] = remote[copy.remote_offset : copy.remote_offset + copy.num_bytes]
    expected = np.full((ours.num_blocks, BLOCK), -1, dtype=np.int64)
    for ours_id, theirs_id in zip(read.local_blocks, read.remote_blocks, strict=True):
        expected[ours_id] = remote.reshape(-1, BLOCK)[theirs_id]
    assert (local == expected.ravel()).all()


@given(reads(), st.integers(1, 6 * BLOCK))
def test_chunks_stay_below_the_limit_and_count_their_ranges(
    case: tuple[KVRead, KVLayout, KVLayout], max_bytes: int
) -> None:
    read, ours, theirs = case
    chunks = plan_read(read, whole(ours, theirs), max_bytes)
    for chunk, ranges in zip(chunks, planned(read, ours, theirs, max_bytes), strict=True):
        assert len(ranges) == chunk.num_ranges
        assert sum(copy.num_bytes for copy in ranges) <= max(BLOCK, max_bytes)


@given(reads())
def test_all_adjacent_ranges_are_merged(case: tuple[KVRead, KVLayout, KVLayout]) -> None:
    for chunk in planned(*case, max_bytes=LAYOUT.total_bytes):
        for first, second in pairwise(chunk):
            adjacent_here = first.local_offset + first.num_bytes == second.local_offset
            adjacent_there = first.remote_offset + first.num_bytes == second.remote_offset
            assert not (adjacent_here and adjacent_there)


def test_adjacent_blocks_in_any_order_are_one_range() -> None:
    pairs = [(11, 31), (10, 30), (13, 33), (12, 32)]
    (chunk,) = planned(read_of(pairs), LAYOUT, LAYOUT, LAYOUT.total_bytes)
    assert chunk == [Copy(10 * BLOCK, 30 * BLOCK, 4 * BLOCK)]


@pytest.mark.parametrize("wrong", [-1, 40, 2**31, 2**32, 2**63, 2**64, -(2**31)])
@pytest.mark.parametrize("side", ["local", "remote"])
def test_a_block_outside_of_its_cache_is_refused(side: str, wrong: int) -> None:
    pair = (wrong, 3) if side == "local" else (3, wrong)
    with pytest.raises(PeerError, match=rf"{side} block {wrong} is outside 0 … 39"):
        plan_read(read_of([(1, 1), pair]), whole(LAYOUT, LAYOUT), BLOCK)


def test_lists_of_unequal_length_are_refused() -> None:
    with pytest.raises(PeerError, match="2 remote for 1 local"):
        plan_read(KVRead(1, "epoch", (1,), (1, 2)), whole(LAYOUT, LAYOUT), BLOCK)


def test_a_local_block_named_twice_is_refused() -> None:
    with pytest.raises(PeerError, match="twice"):
        plan_read(read_of([(1, 1), (1, 2)]), whole(LAYOUT, LAYOUT), BLOCK)


@pytest.mark.parametrize(
    "region",
    [
        KVRegion(4096, LAYOUT.total_bytes - 1, "cpu", 0),  # too small
        KVRegion(2**64 - 64, LAYOUT.total_bytes, "cpu", 0),  # wraps around
        KVRegion(0, LAYOUT.total_bytes, "cpu", 0),
        KVRegion(4096, LAYOUT.total_bytes, "disk", 0),
        KVRegion(4096, LAYOUT.total_bytes, "cpu", -1),
    ],
)
def test_a_region_that_cannot_hold_the_blocks_is_refused(region: KVRegion) -> None:
    with pytest.raises(PeerError):
        check_region(region, LAYOUT.total_bytes, f"{LAYOUT.num_blocks} blocks")
