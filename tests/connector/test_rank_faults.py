"""A peer of several ranks, one of which fails: a read ends once, with all its ranks, and no byte lands after that."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import msgspec
import pytest
from kv_nodes import UNTOUCHED
from kv_ranks import Model, Node, node, random_cells
from kv_teams import Processes, Team

from pdserve.records import EMPTY_CONNECTOR_OUTPUT, Peer, RankKV, ReadResult
from pdserve.rpc.timeouts import PeerTiming

MODEL = Model(num_heads=4, block_size=16, head_dim=64, dtype="bfloat16")


BIG = 640  # blocks; halves of that many are more pieces than are in flight at once
ALL = list(range(BIG))


def shape(num_shards: int, num_blocks: int = 16) -> Node:
    """128 KiB a block."""
    return node(MODEL, (8,), num_shards, 16, [num_blocks])


StartPeer = Callable[[Node], Processes]
StartReader = Callable[..., Team]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start_peer(stack: ExitStack) -> StartPeer:
    def start(of: Node) -> Processes:
        processes = Processes("peer", of)
        stack.callback(processes.kill)
        return processes

    return start


@pytest.fixture
def start_reader(stack: ExitStack) -> StartReader:
    def start(of: Node, peer_timeout: float = 1.5) -> Team:
        return stack.enter_context(closing(Team("nixl", "reader", of, PeerTiming(peer_timeout))))

    return start


def check(reader: Team, blocks: list[int]) -> None:
    """A node of one rank has read these blocks of a peer into those of the same numbers, and no others."""
    (layout,), (share,) = reader.node.layouts, reader.node.shares
    reader.check(random_cells(layout, share, max(blocks) + 1), blocks, blocks)


@pytest.mark.usefixtures("tcp")
def test_a_rank_killed_during_a_read(start_peer: StartPeer, start_reader: StartReader) -> None:
    peer, team = start_peer(shape(2, BIG)), start_reader(shape(1, BIG))
    (reader,) = team.ranks
    assert team.connect(peer.peer) == [""]
    peer.sources[1].send(signal.SIGSTOP)  # so that the read cannot have ended before
    read_id = reader.order(peer.epoch, ALL, ALL)
    reader.wait_for_first_bytes()
    peer.sources[1].kill()
    ended: list[ReadResult] = []
    failed: list[tuple[str, str]] = []
    while not (ended and failed):
        for output in reader.wait(bool, timeout=10):
            ended += output.finished_recving
            failed += output.failed_peers
    assert [result.read_id for result in ended] == [read_id]
    assert f"rank {peer.peer.ranks[1].agent}: the connection broke" in ended[0].error
    assert [epoch for epoch, _ in failed] == [peer.epoch]
    reader.assert_nothing_lands()
    assert reader.connector.poll() is EMPTY_CONNECTOR_OUTPUT, "it is told once"

    after = start_peer(shape(2))
    assert team.connect(after.peer) == [""]
    assert reader.read(peer.epoch, [0], [0]).error
    assert reader.read(after.epoch, [2, 5], [2, 5]).error == ""
    check(team, [2, 5])


@pytest.mark.usefixtures("tcp")
def test_a_rank_that_hangs_during_a_read(start_peer: StartPeer, start_reader: StartReader) -> None:
    peer, team = start_peer(shape(2, BIG)), start_reader(shape(1, BIG))
    (reader,) = team.ranks
    assert team.connect(peer.peer) == [""]
    peer.sources[1].send(signal.SIGSTOP)
    read_id = reader.order(peer.epoch, ALL, ALL)
    reader.wait_for_first_bytes()
    error = reader.result(read_id, timeout=10).error
    assert f"rank {peer.peer.ranks[1].agent}: no byte arrived" in error
    peer.sources[1].send(signal.SIGCONT)
    reader.assert_nothing_lands()
    assert team.connect(peer.peer) == [""], "it goes on in the same life"
    assert reader.read(peer.epoch, [2, 5], [2, 5]).error == ""
    check(team, [2, 5])


@pytest.mark.usefixtures("tcp")
def test_a_read_ends_when_the_last_rank_has_answered(start_peer: StartPeer, start_reader: StartReader) -> None:
    peer, team = start_peer(shape(2)), start_reader(shape(1), peer_timeout=100)
    (reader,) = team.ranks
    assert team.connect(peer.peer) == [""]
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
    check(team, blocks)


@pytest.mark.usefixtures("tcp")
def test_giving_up_on_a_peer_one_rank_of_which_hangs(start_peer: StartPeer, start_reader: StartReader) -> None:
    peer, team = start_peer(shape(2)), start_reader(shape(1), peer_timeout=100)
    (reader,) = team.ranks
    assert team.connect(peer.peer) == [""]
    peer.sources[1].send(signal.SIGSTOP)
    read_id = reader.order(peer.epoch, [1, 2], [1, 2])
    reader.connector.disconnect(peer.epoch)
    assert "given up" in reader.result(read_id, timeout=10).error
    peer.sources[1].send(signal.SIGCONT)
    reader.assert_nothing_lands()
    assert reader.connector.poll() is EMPTY_CONNECTOR_OUTPUT, "who ordered it is not told that it broke"


def test_ranks_that_need_nothing_of_a_dead_one_go_on(start_peer: StartPeer, start_reader: StartReader) -> None:
    peer, team = start_peer(shape(4)), start_reader(shape(2))
    assert team.connect(peer.peer) == ["", ""]
    peer.sources[3].kill()
    good, bad = team.read(peer.epoch, [1, 2], [3, 4])
    assert good.error == ""
    assert peer.peer.ranks[3].agent in bad.error


def someone_elses(rank: RankKV) -> RankKV:
    return msgspec.structs.replace(rank, agent="somebody")


def without_metadata(rank: RankKV) -> RankKV:
    return msgspec.structs.replace(rank, metadata=b"")


def with_memory_never_registered(rank: RankKV) -> RankKV:
    region = msgspec.structs.replace(rank.region, num_bytes=rank.region.num_bytes * 64)
    layout = msgspec.structs.replace(rank.layout, num_blocks=rank.layout.num_blocks * 64)
    return msgspec.structs.replace(rank, region=region, layout=layout)


def with_larger_blocks(rank: RankKV) -> RankKV:
    layout = msgspec.structs.replace(rank.layout, block_size=32, num_blocks=rank.layout.num_blocks // 2)
    return msgspec.structs.replace(rank, layout=layout)


def test_a_peer_one_rank_of_which_cannot_be_connected(start_peer: StartPeer, start_reader: StartReader) -> None:
    peer, team = start_peer(shape(2)), start_reader(shape(1))
    (reader,) = team.ranks
    first, second = peer.peer.ranks
    for changed, reason in (
        (someone_elses, f"rank somebody: the peer says it is somebody, its NIXL metadata is of {second.agent}"),
        (without_metadata, f"rank {second.agent}: connecting failed"),
        (with_memory_never_registered, f"rank {second.agent}: preparing block descriptors failed"),
        (with_larger_blocks, f"rank {second.agent}: KV layouts differ in block_size: 16 here, 32 at the peer"),
    ):
        assert reason in reader.connect(Peer("peer", os.urandom(4).hex(), (first, changed(second))))
    assert reader.connect(peer.peer) == ""
    assert reader.read(peer.epoch, [3], [5]).error == ""
    assert reader.touched() == {3}


def test_connecting_to_a_peer_one_rank_of_which_is_dead(start_peer: StartPeer, start_reader: StartReader) -> None:
    peer, team = start_peer(shape(2)), start_reader(shape(1))
    (reader,) = team.ranks
    peer.sources[1].kill()
    assert peer.peer.ranks[1].agent in reader.connect(peer.peer)
    assert "no connection" in reader.read(peer.epoch, [1], [1]).error
    after = start_peer(shape(2))
    assert reader.connect(after.peer) == ""
    assert reader.read(after.epoch, [1], [1]).error == ""
