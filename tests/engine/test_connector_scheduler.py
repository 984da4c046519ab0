"""Scheduler side of the KV connector; loads and leases in full are in test_scheduler.py and test_lease_protocol.py."""

from __future__ import annotations

from array import array

import pytest
from toy_node import BLOCK, Node

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.cache_parts import CacheParts
from engine.kv_cache.connector_scheduler import KVConnectorScheduler
from engine.kv_cache.peer_kv import PeerKV
from engine.peers.connected_peers import ConnectedPeers
from engine.request import Request
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.sequence import Sequence
from pdserve.hashing import BlockHashes, root_hash
from pdserve.ipc.messages import EventBatch, Mode, StartRead, Submit
from pdserve.records import NO_ORDERS, KVConnectorOutput, ModelRunnerOutput, Peer, ReadResult, StepOutput
from pdserve.request_cost import HANDOFF_SECONDS, LinearCost
from pdserve.sampling_params import SamplingParams


def parts() -> CacheParts:
    return CacheParts(BlockPool(4), EventBatch(), BLOCK)


def test_with_and_without_a_connector_nothing_is_ordered_at_first() -> None:
    for peers in (PeerKV(), ConnectedPeers(parts())):
        connector = KVConnectorScheduler(parts(), peers)
        assert peers.load_cost == LinearCost()
        assert (connector.has_orders, connector.take_orders()) == (False, NO_ORDERS)


def test_without_a_connector_a_handoff_request_is_prefilled_locally() -> None:
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=8, block_size=BLOCK, max_num_seqs=2, max_batch_tokens=32, full_step=16, max_waiting=2
        ),
    )
    prompt = array("I", range(10)).tobytes()
    scheduler.submit(Submit(1, prompt, SamplingParams(max_tokens=1), Mode.HANDOFF))
    assert scheduler.status().backlog == 10
    plan = scheduler.plan()
    assert [(item.num_tokens, item.num_samples) for item in plan.scheduled] == [(10, 1)]


def load(node: Node, rid: int, num_tokens: int) -> None:
    """Reserve blocks for a prompt that a peer computes."""
    node.submit(rid, list(range(num_tokens)), SamplingParams(max_tokens=2), Mode.HANDOFF)
    reserved: list[EventBatch] = [node.step()]
    assert [reservation.rid for reservation in reserved[0].reserved] == [rid]


def test_loads_are_measured_as_the_cost_of_tokens() -> None:
    node = Node(64, 1)
    connector = node.scheduler.connector
    peers = node.peers
    assert peers.load_cost == LinearCost()
    load(node, 1, 10 * BLOCK)
    peers.start_read(StartRead(1, "epoch", tuple(range(8)), 8 * BLOCK))
    (order,) = connector.take_orders().reads
    result = ReadResult(order.read_id, seconds=0.5)
    connector.update(ModelRunnerOutput(StepOutput(0), KVConnectorOutput((result,))))
    assert peers.load_cost.at(8 * BLOCK) == pytest.approx(0.5)
    assert node.scheduler.status().costs.read == peers.load_cost
    node.close()


def sequence(rid: int) -> Sequence:
    tokens = array("I", range(10))
    hashes = BlockHashes(BLOCK, root_hash(""))
    request = Request(rid, tokens.tobytes(), SamplingParams(max_tokens=2), Mode.HANDOFF, "")
    return Sequence(rid, request, 0, token_ids=tokens, hashes=hashes, prompt_len=10, max_length=12)


def test_a_load_is_expected_as_long_after_the_peers_last_chunk_as_earlier_ones_took() -> None:
    peers = ConnectedPeers(parts())
    first = sequence(1)
    second = sequence(2)
    peers.load(first)
    assert not list(peers.arrivals)
    peers.handoff_ends(1, 10.0)
    assert list(peers.arrivals) == [10.0 + HANDOFF_SECONDS]
    peers.finish_load(first, 0, 10.25)
    peers.load(second)
    peers.handoff_ends(2, 20.0)
    assert list(peers.arrivals) == [20.25]


def test_orders_are_taken_once() -> None:
    peers = ConnectedPeers(parts())
    peer = Peer("p", "epoch", ())
    connector = KVConnectorScheduler(parts(), peers)
    peers.connect(peer)
    peers.disconnect("earlier")
    assert connector.has_orders
    orders = connector.take_orders()
    assert (orders.connect, orders.disconnect, orders.reads) == ((peer,), ("earlier",), ())
    assert not connector.has_orders
    assert connector.take_orders() is NO_ORDERS
