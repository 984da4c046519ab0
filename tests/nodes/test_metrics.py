"""What nodes export is what docs/metrics.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from node_client import RouterClient, greedy
from node_fleet import Nodes

from pdserve.metrics import Histogram, series

TABLE = Path(__file__).parents[2] / "docs" / "metrics.md"
_ROW = re.compile(r"\| `(?P<name>\w+)` \| (?P<nodes>[PD, ]+) \| (?P<labels>[a-z, ]*)\|")
_SERIES = re.compile(r'(?P<name>\w+)(\{(?P<labels>(\w+="[^"]*",?)+)\})?')
_LABEL = re.compile(r'(\w+)="')


def documented(node: str) -> dict[str, set[str]]:
    """Names and labels of the metrics of a "P" or a "D"."""
    rows = [match for line in TABLE.read_text().splitlines() if (match := _ROW.match(line))]
    return {row["name"]: set(re.findall(r"\w+", row["labels"])) for row in rows if node in row["nodes"]}


def exported(counters: dict[str, float]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for key in counters:
        match = _SERIES.fullmatch(key)
        assert match, key
        name, labels = match["name"], set(_LABEL.findall(match["labels"] or ""))
        if name.endswith(("_seconds_bucket", "_seconds_sum", "_seconds_count")):
            name, labels = name.rpartition("_")[0], labels - {"le"}
        found[name] = labels
    return found


@pytest.mark.parametrize("kind", ["P", "D"])
def test_the_table_is_what_a_node_exports(kind: str, nodes: Nodes) -> None:
    node = nodes.prefill if kind == "P" else nodes.decode
    assert exported(dict(node.status().counters)) == documented(kind)


def test_reads_are_counted_for_the_peer_they_came_from(nodes: Nodes) -> None:
    """Peers go by the addresses that were configured: here, those of proxies."""

    def of(address: str) -> list[float]:
        found = nodes.decode.status().counters
        return [found[series(f"pdserve_kv_{name}_total", peer=address)] for name in ("reads", "read_bytes")]

    before = of(nodes.proxy.address), of(nodes.short_proxy.address)
    handoffs = nodes.decode.status().counters["pdserve_handoff_exposed_seconds_count"]
    with RouterClient(nodes.decode.address) as client:
        client.generate(range(3, 103), greedy(4), nodes.main, cache_salt="metrics")
    block_bytes = 2 * 2 * 2 * 8 * 32 * 4  # layers, heads, K and V, tokens, head size, float32
    (reads, num_bytes), idle = before
    assert of(nodes.proxy.address) == [reads + 1, num_bytes + 13 * block_bytes]
    assert of(nodes.short_proxy.address) == idle
    status = nodes.decode.status().counters
    assert status[series("pdserve_peer_connected", peer=nodes.proxy.address, transport="shm")] == 1
    assert status["pdserve_handoff_exposed_seconds_count"] == handoffs + 1


def test_series_and_histograms_are_as_prometheus_writes_them() -> None:
    assert series("a_total") == "a_total"
    assert series("a_total", peer='say "hi"\\', x="1") == 'a_total{peer="say \\"hi\\"\\\\",x="1"}'
    histogram = Histogram("a_seconds", (0.5, 2.0))
    for value in (0.5, 0.6, 3.0):
        histogram.observe(value)
    assert histogram.export() == {
        'a_seconds_bucket{le="0.5"}': 1,
        'a_seconds_bucket{le="2"}': 2,
        'a_seconds_bucket{le="+Inf"}': 3,
        "a_seconds_sum": pytest.approx(4.1),
        "a_seconds_count": 3,
    }
