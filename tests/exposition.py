"""What Prometheus would read: metrics of a process over HTTP, and those that docs/metrics.md says there are."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
from fleet import NodeProcess
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

TABLE = Path(__file__).parents[1] / "docs" / "metrics.md"
_ROW = re.compile(
    r"\| `(?P<name>\w+)` \| (?P<on>[RPD, ]+) \| (?P<type>\w+) \| (?P<labels>[a-z_, ]*)\| (?P<meaning>.*)\|"
)
_PARTS = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


@dataclass(frozen=True)
class Row:
    """A metric. ``on`` has the letters of the roles that export it: R, P, D."""

    name: str
    on: frozenset[str]
    type: str
    labels: frozenset[str]
    meaning: str

    @property
    def series(self) -> dict[str, frozenset[str]]:
        """Names of its series, as queries use them, and their labels."""
        le = frozenset({"le"})
        return {self.name + part: self.labels | (le if part == "_bucket" else set()) for part in _PARTS[self.type]}


def documented() -> list[Row]:
    rows = [found for line in TABLE.read_text().splitlines() if (found := _ROW.match(line))]
    return [Row(row["name"], _words(row["on"]), row["type"], _words(row["labels"]), row["meaning"]) for row in rows]


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text))


def scraped(url: str) -> list[Metric]:
    """The families at ``url``, counters under their names with _total."""
    with urllib.request.urlopen(url, timeout=10.0) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    for family in families:
        if family.type == "counter":
            family.name += "_total"
    return families


def metrics_url(node: NodeProcess) -> str:
    """Of a node that was started with ``--metrics-port 0``: of its two ports, the one that is not its address."""
    listening = [
        each.laddr for each in psutil.Process(node.pid).net_connections("tcp") if each.status == psutil.CONN_LISTEN
    ]
    (port,) = {each.port for each in listening} - {int(node.address.rpartition(":")[2])}
    return f"http://127.0.0.1:{port}/metrics"


def value(families: Iterable[Metric], name: str, **labels: str) -> float:
    """Of the one series with that name and those labels, beside which it may have others."""
    (found,) = [
        sample for sample in samples(families) if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return float(found.value)


def samples(families: Iterable[Metric]) -> Iterable[Sample]:
    return [sample for family in families for sample in family.samples]
