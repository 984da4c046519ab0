"""Reads of all connectors that move bytes: NIXL between processes, memmove within one (tests/support)."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from kv_nodes import Reader, Source, pattern

from connector import build
from connector.setup import ConnectorSetup
from pdserve.kv.layout import FullAttentionSpec, KVLayout, KVRegion
from pdserve.records import EMPTY_CONNECTOR_OUTPUT, Peer

LOCAL = "local_connector:LocalConnector"

# Blocks of 2 KiB: 5,000 of them are more than one chunk.
OURS = KVLayout(
    num_blocks=6000, block_size=16, kernel_block_size=16, num_layers=1, spec=FullAttentionSpec(1, 16, "float32")
)
THEIRS = msgspec.structs.replace(OURS, num_blocks=5000)


class Pair:
    def __init__(self, reader: Reader, peer: Peer) -> None:
        self.reader = reader
        self.peer = peer
        self.epoch = peer.epoch

    def check(self, local: list[int], remote: list[int]) -> None:
        """Assert that the wanted bytes are in place and no other block was touched."""
        assert (self.reader.blocks[local] == pattern(THEIRS)[remote]).all()
        others = np.setdiff1d(np.arange(OURS.num_blocks), local)
        assert (self.reader.blocks[others] == 255).all()


@pytest.fixture(scope="module", params=["nixl", LOCAL])
def shared_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    reader = Reader(build(request.param, ConnectorSetup(f"reader-{os.urandom(4).hex()}")), OURS)
    if request.param == "nixl":
        source = Source("source-e1", THEIRS)
        peer = source.peer
    else:
        cache = pattern(THEIRS)
        owner = build(LOCAL, ConnectorSetup("source-e1"))
        region = KVRegion(cache.ctypes.data, cache.nbytes, "cpu", 0)
        peer = Peer("source", "e1", (owner.register(region, THEIRS, lambda: None),))
    yield Pair(reader, peer)
    reader.connector.close()
    if request.param == "nixl":
        assert source.finish() == 0
    else:
        owner.close()


@pytest.fixture
def pair(shared_pair: Pair) -> Pair:
    shared_pair.reader.reset()
    assert shared_pair.reader.connect(shared_pair.peer) == ""
    return shared_pair


def test_adjacent_blocks_arrive_as_one_range(pair: Pair) -> None:
    local = list(range(100, 200))
    remote = list(range(300, 400))
    result = pair.reader.read(pair.epoch, local, remote)
    assert (result.error, result.num_bytes, result.num_descriptors) == ("", 100 * OURS.block_bytes, 1)
    pair.check(local, remote)


def test_scattered_blocks_arrive_in_their_places(pair: Pair) -> None:
    local = [5999, 0, 17, 18, 400]
    remote = [4999, 4, 18, 17, 0]
    result = pair.reader.read(pair.epoch, local, remote)
    assert (result.error, result.num_descriptors) == ("", 5)
    pair.check(local, remote)


def test_thousands_of_blocks_in_random_order(pair: Pair) -> None:
    rng = random.Random(0)
    local = rng.sample(range(OURS.num_blocks), 5000)
    remote = rng.sample(range(THEIRS.num_blocks), 5000)
    result = pair.reader.read(pair.epoch, local, remote)
    assert (result.error, result.num_bytes) == ("", 5000 * OURS.block_bytes)
    pair.check(local, remote)


def test_one_remote_block_may_be_read_twice(pair: Pair) -> None:
    assert pair.reader.read(pair.epoch, [1, 2], [7, 7]).error == ""
    pair.check([1, 2], [7, 7])


def test_an_empty_read_ends(pair: Pair) -> None:
    result = pair.reader.read(pair.epoch, [], [])
    assert (result.error, result.num_bytes) == ("", 0)


def test_concurrent_reads_all_end(pair: Pair) -> None:
    blocks = [list(range(i, 4000, 40)) for i in range(40)]
    waiting = {pair.reader.order(pair.epoch, ids, ids) for ids in blocks}
    while waiting:
        for result in pair.reader.wait(lambda output: bool(output.finished_recving))[-1].finished_recving:
            assert result.error == ""
            waiting.remove(result.read_id)
    pair.check(list(range(4000)), list(range(4000)))


@pytest.mark.parametrize(
    ("local", "remote", "message"),
    [
        ([1, 2], [3, 5000], "remote block 5000"),
        ([1, 2], [3, 2**32], "remote block"),
        ([1, 2], [-1, 3], "remote block -1"),
        ([1, 6000], [3, 4], "local block 6000"),
        ([1, 2], [3], "1 remote for 2 local"),
        ([1, 1], [3, 4], "twice"),
    ],
)
def test_an_invalid_read_fails_and_touches_no_block(
    pair: Pair, local: list[int], remote: list[int], message: str
) -> None:
    result = pair.reader.read(pair.epoch, local, remote)
    assert message in result.error
    assert not pair.reader.touched()


def test_a_read_from_an_unknown_epoch_fails(pair: Pair) -> None:
    result = pair.reader.read("never-seen", [4, 5], [4, 5])
    assert "never-seen" in result.error


def test_reads_fail_between_disconnect_and_connect(pair: Pair) -> None:
    pair.reader.connector.disconnect(pair.epoch)
    assert pair.epoch in pair.reader.read(pair.epoch, [1], [1]).error
    assert pair.reader.connect(pair.peer) == ""
    assert pair.reader.read(pair.epoch, [2], [2]).error == ""
    pair.check([2], [2])


def test_disconnecting_ends_each_unfinished_read_once(pair: Pair) -> None:
    blocks = list(range(4000))
    waiting = {pair.reader.order(pair.epoch, blocks, blocks) for _ in range(5)}
    pair.reader.connector.disconnect(pair.epoch)
    while waiting:
        for result in pair.reader.wait(lambda output: bool(output.finished_recving))[-1].finished_recving:
            waiting.remove(result.read_id)
    assert pair.reader.connector.poll() is EMPTY_CONNECTOR_OUTPUT


def test_disconnecting_from_an_unknown_epoch_is_ignored(pair: Pair) -> None:
    pair.reader.connector.disconnect("never-seen")
    assert pair.reader.read(pair.epoch, [1], [1]).error == ""


def test_connecting_twice_is_reported_twice(pair: Pair) -> None:
    assert pair.reader.connect(pair.peer) == ""
    assert pair.reader.read(pair.epoch, [1], [1]).error == ""


def test_another_layout_is_refused_with_both_values(pair: Pair) -> None:
    rank = pair.peer.ranks[0]
    other = msgspec.structs.replace(rank, layout=msgspec.structs.replace(rank.layout, num_layers=3))
    reason = pair.reader.connect(Peer("other", "e9", (other,)))
    assert "num_layers: 1 here, 3 at the peer" in reason


def test_a_layout_larger_than_the_region_is_refused(pair: Pair) -> None:
    rank = pair.peer.ranks[0]
    other = msgspec.structs.replace(rank, layout=msgspec.structs.replace(rank.layout, num_blocks=5001))
    assert "5001 blocks" in pair.reader.connect(Peer("other", "e9", (other,)))


def test_a_peer_that_does_not_exist_is_refused(pair: Pair) -> None:
    missing = msgspec.structs.replace(pair.peer.ranks[0], agent="missing-e0", metadata=b"\x00" * 64)
    assert pair.reader.connect(Peer("missing", "e0", (missing,))) != ""
