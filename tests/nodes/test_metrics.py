"""Metrics of nodes and their notation. tests/e2e compares their names with docs/metrics.md."""

from __future__ import annotations

import pytest
from node_client import RouterClient, greedy
from node_fleet import Nodes

from node.reading.reading_metrics import ReadingMetrics
from pdserve.errors import LeaseRevoked
from pdserve.metrics import FastHistogram, flat, series
from pdserve.request_cost import HANDOFF_SECONDS, LinearCost, StepCosts


def test_kv_reads_are_counted_by_peer(nodes: Nodes) -> None:
    """A peer's label is its configured address, here that of a proxy."""

    def of(address: str) -> list[float]:
        counters = nodes.decode.status().counters
        return [counters[series(f"pdserve_kv_{name}_total", peer=address)] for name in ("reads", "read_bytes")]

    before = of(nodes.proxy.address), of(nodes.short_proxy.address)
    handoffs = nodes.decode.status().counters["pdserve_handoff_exposed_seconds_count"]
    with RouterClient(nodes.decode.address) as client:
        client.generate(range(3, 103), greedy(8), nodes.main, cache_salt="metrics")
    block_bytes = 2 * 2 * 2 * 8 * 32 * 4  # layers, heads, K and V, tokens, head size, float32
    (reads, num_bytes), idle = before
    assert of(nodes.proxy.address) == [reads + 1, num_bytes + 13 * block_bytes]
    assert of(nodes.short_proxy.address) == idle
    status = nodes.decode.status().counters
    assert status[series("pdserve_peer_connected", peer=nodes.proxy.address, transport="shm")] == 1
    assert status["pdserve_handoff_exposed_seconds_count"] == handoffs + 1


def test_series_and_histograms_are_in_prometheus_notation() -> None:
    assert series("a_total") == "a_total"
    assert series("a_total", peer='say "hi"\\', x="1") == 'a_total{peer="say \\"hi\\"\\\\",x="1"}'
    tally = FastHistogram("a_seconds", "", (0.5, 2.0))
    for value in (0.5, 0.6, 3.0):
        tally.observe(value)
    assert flat(tally.collect()) == {
        'a_seconds_bucket{le="0.5"}': 1,
        'a_seconds_bucket{le="2.0"}': 2,
        'a_seconds_bucket{le="+Inf"}': 3,
        "a_seconds_sum": pytest.approx(4.1),
        "a_seconds_count": 3,
    }


def test_pulls_count_the_time_that_they_save_or_lose() -> None:
    """A token takes a millisecond to compute, and a tenth of that to read."""
    costs = StepCosts(prompt=LinearCost(0.0, 1e-3), read=LinearCost(0.0, 1e-4))
    metrics = ReadingMetrics()

    def added() -> list[float]:
        before = dict(counted)
        counted.update(flat(metrics.collect()))
        names = [f"pdserve_pull_{name}_seconds_total" for name in ("expected_saved", "saved", "lost")]
        return [counted[name] - before.get(name, 0.0) for name in names]

    counted: dict[str, float] = {}
    metrics.count_pull(1000, costs, 0.3)
    assert added() == pytest.approx([0.9 - HANDOFF_SECONDS, 0.7, 0.0])
    metrics.count_pull(1000, costs, 1.2)
    assert added() == pytest.approx([0.9 - HANDOFF_SECONDS, 0.0, 0.2])
    metrics.count_pull(600, costs, 0.5, computed=400)
    assert added() == pytest.approx([0.6, 0.5, 0.0])
    metrics.count_pull(0, costs, 0.1, computed=400)
    assert added() == pytest.approx([0.0, 0.0, 0.1])
    assert counted["pdserve_pull_computed_tokens_total"] == 400
    metrics.count_failed_pull(LeaseRevoked("taken back"), 0.4)
    assert added() == pytest.approx([0.0, 0.0, 0.4])
    metrics.count_pull(1000, StepCosts(), 0.5)
    assert added() == [0.0, 0.0, 0.0], "nothing is known about computing"
