"""The worker side of host memory: every byte arrives, over pieces of any size."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine import patience

import connector
from connector.backends import host_memory
from connector.backends.host_memory import runs
from connector.setup import ConnectorSetup
from pdserve.host import memory_limits
from pdserve.kv.host_copies import CopyResult, HostCopy, HostRoom
from pdserve.kv.layout import FullAttentionSpec, KVLayout, KVRegion
from pdserve.protocols import HostMemory

LAYOUT = KVLayout(50, 4, 4, 1, FullAttentionSpec(1, 2, "float32"))  # blocks of 64 bytes
NUM_HOST = 40


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), unique_by=(lambda x: x[0], lambda x: x[1])),
    st.integers(1, 5),
)
def test_runs_cover_each_item_once_and_cross_no_piece(pairs: list[tuple[int, int]], per_piece: int) -> None:
    items = [item for item, _ in pairs]
    host_items = [item for _, item in pairs]
    copied = []
    for run in runs(items, host_items, per_piece):
        assert run.host_first // per_piece == (run.host_first + run.length - 1) // per_piece
        copied += [(run.first + at, run.host_first + at) for at in range(run.length)]
    assert copied == pairs


class Rank:
    """The device memory of a rank on a CPU, and its host memory."""

    def __init__(self) -> None:
        self.memory = bytearray(random.Random(1).randbytes(LAYOUT.total_bytes))
        self._progress = threading.Event()
        address = ctypes.addressof((ctypes.c_char * len(self.memory)).from_buffer(self.memory))
        region = KVRegion(address, len(self.memory), "cpu", 0)
        self.host: HostMemory = connector.host_memory(
            HostRoom(NUM_HOST), region, LAYOUT, ConnectorSetup(), self._progress.set
        )

    def block(self, number: int) -> bytes:
        return bytes(self.memory[number * LAYOUT.block_bytes : (number + 1) * LAYOUT.block_bytes])

    def grow(self, blocks: int = NUM_HOST) -> int:
        """Allocate until host memory has ``blocks`` blocks. Return how many it has."""
        self.host.allocate()
        grown = 0
        while grown < blocks:
            assert self._progress.wait(patience(10.0))
            self._progress.clear()
            grown = max([grown, *(room.num_blocks for room in self.host.poll()[1])])
        return grown

    def copy(self, order: HostCopy) -> CopyResult:
        self.host.copy(order)
        while not (ended := self.host.poll()[0]):
            assert self._progress.wait(patience(10.0))
            self._progress.clear()
        return ended[0]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setattr(host_memory, "_PIECE_BYTES", 7 * LAYOUT.block_bytes)
    rank = Rank()
    yield rank
    rank.host.close()


def test_blocks_come_back_to_other_places(rank: Rank) -> None:
    rank.grow()
    chance = random.Random(2)
    blocks = chance.sample(range(50), NUM_HOST)
    host_blocks = chance.sample(range(NUM_HOST), NUM_HOST)
    before = [rank.block(block) for block in blocks]
    stored = rank.copy(HostCopy(1, load=False, blocks=tuple(blocks), host_blocks=tuple(host_blocks)))
    assert (stored.copy_id, stored.error, stored.num_bytes) == (1, "", NUM_HOST * LAYOUT.block_bytes)
    rank.memory[:] = bytes(len(rank.memory))
    targets = chance.sample(range(50), NUM_HOST)
    rank.copy(HostCopy(2, load=True, blocks=tuple(targets), host_blocks=tuple(host_blocks)))
    assert [rank.block(block) for block in targets] == before
    for block in set(range(50)) - set(targets):
        assert rank.block(block) == bytes(LAYOUT.block_bytes)


def test_memory_stops_growing_before_the_host_has_none(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces that were allocated before are used."""
    left = iter([1 << 30] * 3)
    monkeypatch.setattr(memory_limits, "free_memory", lambda: next(left, 0))
    assert rank.grow(21) == 21
    rank.host.close()
    assert not rank.host.poll()[1]
