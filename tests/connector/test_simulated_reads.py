"""Simulated reads: each ends once, when its time has passed or its peer is disconnected."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from machine import patience

from connector.backends.simulated import SimulatedConnector
from connector.setup import ConnectorSetup
from pdserve.config.simulated_costs import SimulatedCosts
from pdserve.kv.layout import FullAttentionSpec, KVLayout, KVRegion
from pdserve.records import KVConnectorOutput, KVRead, Peer, ReadResult

LAYOUT = KVLayout(
    num_blocks=100, block_size=16, kernel_block_size=16, num_layers=2, spec=FullAttentionSpec(2, 8, "bfloat16")
)
FREE = SimulatedCosts(read=0.0, read_token=0.0)


@contextmanager
def connected(costs: SimulatedCosts) -> Iterator[SimulatedConnector]:
    connector = SimulatedConnector(ConnectorSetup("here", costs=costs))
    rank = connector.register(KVRegion(0, LAYOUT.total_bytes, "cpu", 0), LAYOUT, lambda: None)
    try:
        connector.connect(Peer("there", "epoch", (rank,)))
        assert wait_for_connection(connector) == "epoch"
        yield connector
    finally:
        connector.close()


def wait_for_connection(connector: SimulatedConnector) -> str:
    """Return the epoch of the next connection."""
    end = time.monotonic() + patience(5.0)
    while not (connected := connector.poll().connected):
        assert time.monotonic() < end
        time.sleep(0.001)
    (connection,) = connected
    return connection.epoch


def wait_for_reads(connector: SimulatedConnector, num_reads: int) -> KVConnectorOutput:
    """Return the results of the next ``num_reads`` reads as one output."""
    end = time.monotonic() + patience(5.0)
    results: list[ReadResult] = []
    while len(results) < num_reads:
        assert time.monotonic() < end
        output = connector.poll()
        results += output.finished_recving
        time.sleep(0.001)
    return KVConnectorOutput(tuple(results))


def test_reads_end_in_order_and_report_their_bytes() -> None:
    with connected(SimulatedCosts(read=0.02, read_token=0.001)) as connector:
        start = time.monotonic()
        connector.read(KVRead(1, "epoch", (4, 5), (7, 8)))
        connector.read(KVRead(2, "epoch", (6,), (9,)))
        output = wait_for_reads(connector, 2)
        assert time.monotonic() - start > 0.0879
    assert [result.read_id for result in output.finished_recving] == [1, 2]
    assert [result.num_bytes for result in output.finished_recving] == [2 * LAYOUT.block_bytes, LAYOUT.block_bytes]
    assert all(result.error == "" for result in output.finished_recving)


def test_disconnecting_fails_reads_of_that_peer_only() -> None:
    with connected(SimulatedCosts(read=0.2)) as connector:
        connector.connect(Peer("elsewhere", "other", ()))
        connector.read(KVRead(1, "epoch", (4,), (7,)))
        connector.read(KVRead(2, "other", (5,), (7,)))
        connector.disconnect("epoch")
        output = wait_for_reads(connector, 2)
    assert [(result.read_id, bool(result.error)) for result in output.finished_recving] == [(1, True), (2, False)]


def test_a_read_from_an_unknown_epoch_fails() -> None:
    with connected(FREE) as connector:
        connector.disconnect("epoch")
        connector.read(KVRead(1, "epoch", (4,), (7,)))
        output = wait_for_reads(connector, 1)
    assert "epoch" in output.finished_recving[0].error


def test_close_does_not_wait_for_reads() -> None:
    with connected(SimulatedCosts(read=1000.0)) as connector:
        connector.read(KVRead(1, "epoch", (4,), (7,)))
    connector.close()
