"""A peer with several ranks, one of which fails: a read ends once, with all ranks, and no byte lands later."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import msgspec
import pytest
from kv_nodes import UNTOUCHED
from kv_rank_groups import RankGroup, RankProcesses
from kv_ranks import Model, Node, node, random_cells
from machine import patience

from pdserve.records import EMPTY_CONNECTOR_OUTPUT, Peer, RankKV, ReadResult
from pdserve.rpc.timeouts import PeerTiming

MODEL = Model(num_heads=4, block_size=16, head_dim=64, dtype="bfloat16")


BIG = 640  # blocks; half of them are more chunks than are in flight at once
ALL = list(range(BIG))


def shape(num_shards: int, num_blocks: int = 16) -> Node:
    """Blocks of 128 KiB."""
    return node(MODEL, (8,), num_shards, 16, [num_blocks])


StartPeer = Callable[[Node], RankProcesses]
StartReader = Callable[..., RankGroup]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start_peer(stack: ExitStack) -> StartPeer:
    def start(of: Node) -> RankProcesses:
        processes = RankProcesses("peer", of)
        stack.callback(processes.kill)
        return processes

    return start


@pytest.fixture
def start_reader(stack: ExitStack) -> StartReader:
    def start(of: Node, peer_timeout: float = 1.5) -> RankGroup:
        return stack.enter_context(closing(RankGroup("nixl", "reader", of, PeerTiming(peer_timeout))))

    return start


def check(reader: RankGroup, blocks: list[int]) -> None:
    """Assert that a node of one rank has read these blocks of a peer into equal block numbers, and no others."""
    (layout,) = reader.node.layouts
    (share,) = reader.node.shares
    reader.check(random_cells(layout, share, max(blocks) + 1), blocks, blocks)


@pytest.mark.usefixtures("tcp")
def test_a_rank_killed_during_a_read_fails_the_read_once(start_peer: StartPeer, start_reader: StartReader) -> None:
    peer = start_peer(shape(2, BIG))
    group = start_reader(shape(1, BIG))
    (reader,) = group.ranks
    assert group.connect(peer.peer) == [""]
    peer.sources[1].send(signal.SIGSTOP)  # so that the read cannot have ended before
    read_id = reader.order(peer.epoch, ALL, ALL)
    reader.wait_for_first_bytes()
    peer.sources[1].kill()
    ended: list[ReadResult] = []
    failed: list[tuple[str, str]] = []
    while not (ended and failed):
        for output in reader.wait(bool, timeout=patience(10)):
            ended += output.finished_recving
            failed += output.failed_peers
    assert [result.read_id for result in ended] == [read_id]
    assert f"rank {peer.peer.ranks[1].agent}: the connection broke" in ended[0].error
    assert [epoch for epoch, _ in failed] == [peer.epoch]
    reader.assert_nothing_lands()
    assert reader.connector.poll() is EMPTY_CONNECTOR_OUTPUT, "a failure is reported once"

    after = start_peer(shape(2))
    assert group.connect(after.peer) == [""]
    assert reader.read(peer.epoch, [0], [0]).error
    assert reader.read(after.epoch, [2, 5], [2, 5]).error == ""
    check(group, [2, 5])


@pytest.mark.usefixtures("tcp")
def test_a_hung_rank_fails_the_read(start_peer: StartPeer, start_reader: StartReader) -> None:
    peer = start_peer(shape(2, BIG))
    group = start_reader(shape(1, BIG))
    (reader,) = group.ranks
    assert group.connect(peer.peer) == [""]
    peer.sources[1].send(signal.SIGSTOP)
    read_id = reader.order(peer.epoch, ALL, ALL)
    reader.wait_for_first_bytes()
    error = reader.result(read_id, timeout=patience(10)).error
    assert f"rank {peer.peer.ranks[1].agent}: no byte arrived" in error
    peer.sources[1].send(signal.SIGCONT)
    reader.assert_nothing_lands()
    assert group.connect(peer.peer) == [""], "the peer continues in the same epoch"
    assert reader.read(peer.epoch, [2, 5], [2, 5]).error == ""
    check(group, [2, 5])


@pytest.mark.usefixtures("tcp")
def test_a_read_ends_with_its_last_rank(start_peer: StartPeer, start_reader: StartReader) -> None:
    peer = start_peer(shape(2))
    group = start_reader(shape(1), peer_timeout=100)
    (reader,) = group.ranks
    assert group.connect(peer.peer) == [""]
    peer.sources[1].send(signal.SIGSTOP)
    blocks = list(range(16))
    read_id = reader.order(peer.epoch, blocks, blocks)
    heads = reader.blocks.reshape(16, MODEL.num_heads, -1)
    while not (heads[:, :2] != UNTOUCHED).all():
        reader.connector.poll()
    assert (heads[:, 2:] == UNTOUCHED).all()
    assert reader.connector.poll() is EMPTY_CONNECTOR_OUTPUT
    peer.sources[1].send(signal.SIGCONT)
    assert reader.result(read_id).error == ""
    check(group, blocks)


@pytest.mark.usefixtures("tcp")
def test_disconnecting_ends_reads_from_a_hung_rank(start_peer: StartPeer, start_reader: StartReader) -> None:
    peer = start_peer(shape(2))
    group = start_reader(shape(1), peer_timeout=100)
    (reader,) = group.ranks
    assert group.connect(peer.peer) == [""]
    peer.sources[1].send(signal.SIGSTOP)
    read_id = reader.order(peer.epoch, [1, 2], [1, 2])
    reader.connector.disconnect(peer.epoch)
    assert "given up" in reader.result(read_id, timeout=patience(10)).error
    peer.sources[1].send(signal.SIGCONT)
    reader.assert_nothing_lands()
    assert reader.connector.poll() is EMPTY_CONNECTOR_OUTPUT, (
        "a disconnect that was ordered is not reported as a failure"
    )


def test_ranks_that_do_not_read_from_a_dead_rank_succeed(start_peer: StartPeer, start_reader: StartReader) -> None:
    peer = start_peer(shape(4))
    group = start_reader(shape(2))
    assert group.connect(peer.peer) == ["", ""]
    peer.sources[3].kill()
    good, bad = group.read(peer.epoch, [1, 2], [3, 4])
    assert good.error == ""
    assert peer.peer.ranks[3].agent in bad.error


def with_other_name(rank: RankKV) -> RankKV:
    return msgspec.structs.replace(rank, agent="other")


def without_metadata(rank: RankKV) -> RankKV:
    return msgspec.structs.replace(rank, metadata=b"")


def with_unregistered_memory(rank: RankKV) -> RankKV:
    region = msgspec.structs.replace(rank.region, num_bytes=rank.region.num_bytes * 64)
    layout = msgspec.structs.replace(rank.layout, num_blocks=rank.layout.num_blocks * 64)
    return msgspec.structs.replace(rank, region=region, layout=layout)


def with_larger_blocks(rank: RankKV) -> RankKV:
    layout = msgspec.structs.replace(rank.layout, block_size=32, num_blocks=rank.layout.num_blocks // 2)
    return msgspec.structs.replace(rank, layout=layout)


def test_a_peer_with_one_wrong_rank_is_refused(start_peer: StartPeer, start_reader: StartReader) -> None:
    peer = start_peer(shape(2))
    group = start_reader(shape(1))
    (reader,) = group.ranks
    first, second = peer.peer.ranks
    for changed, reason in (
        (with_other_name, f"rank other: the peer says it is other, its NIXL metadata is of {second.agent}"),
        (without_metadata, f"rank {second.agent}: connecting failed"),
        (with_unregistered_memory, f"rank {second.agent}: preparing block descriptors failed"),
        (with_larger_blocks, f"rank {second.agent}: KV layouts differ in block_size: 16 here, 32 at the peer"),
    ):
        assert reason in reader.connect(Peer("peer", os.urandom(4).hex(), (first, changed(second))))
    assert reader.connect(peer.peer) == ""
    assert reader.read(peer.epoch, [3], [5]).error == ""
    assert reader.touched() == {3}


def test_a_peer_with_a_dead_rank_is_refused(start_peer: StartPeer, start_reader: StartReader) -> None:
    peer = start_peer(shape(2))
    group = start_reader(shape(1))
    (reader,) = group.ranks
    peer.sources[1].kill()
    assert peer.peer.ranks[1].agent in reader.connect(peer.peer)
    assert "no connection" in reader.read(peer.epoch, [1], [1]).error
    after = start_peer(shape(2))
    assert reader.connect(after.peer) == ""
    assert reader.read(after.epoch, [1], [1]).error == ""
