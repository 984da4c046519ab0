"""Metrics in the Prometheus exposition format, scraped from a process, and the tables of the docs."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
from machine import patience
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_DOCS = Path(__file__).parents[2] / "docs"
PAGES = (_DOCS / "metrics.md", _DOCS / "cluster.md")  # the latter has vLLM's names
_ROW = re.compile(
    r"\| `(?P<name>[\w:]+)` \| (?P<on>[RPD, ]+) \| (?P<type>\w+) \| (?P<labels>[a-z_, ]*)\| (?P<meaning>.*)\|"
)
_PARTS = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


@dataclass(frozen=True)
class Row:
    """A row of the table. ``on`` has the letters of the roles that export the metric: R, P, D."""

    name: str
    on: frozenset[str]
    type: str
    labels: frozenset[str]
    meaning: str

    @property
    def series(self) -> dict[str, frozenset[str]]:
        """Names of the metric's series, as in queries, and their labels."""
        le = frozenset({"le"})
        return {self.name + part: self.labels | (le if part == "_bucket" else set()) for part in _PARTS[self.type]}


def documented_metrics() -> list[Row]:
    rows = [row for page in PAGES for line in page.read_text().splitlines() if (row := _ROW.match(line))]
    return [Row(row["name"], _words(row["on"]), row["type"], _words(row["labels"]), row["meaning"]) for row in rows]


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text))


def scrape(url: str) -> list[Metric]:
    """Return the metric families at ``url``; names of counters end in _total."""
    with urllib.request.urlopen(url, timeout=patience(10.0)) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    for family in families:
        if family.type == "counter":
            family.name += "_total"
    return families


class Listening(Protocol):
    """A process that listens at ``address``, and at another port for metrics."""

    @property
    def pid(self) -> int: ...

    @property
    def address(self) -> str: ...


def metrics_url(process: Listening) -> str:
    """Return the metrics URL of a process with ``--metrics-port 0``: it listens on two ports."""
    listening = [
        connection.laddr
        for connection in psutil.Process(process.pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    (port,) = {address.port for address in listening} - {int(process.address.rpartition(":")[2])}
    return f"http://127.0.0.1:{port}/metrics"


def value(families: Iterable[Metric], name: str, **labels: str) -> float:
    """Return the value of the only series with this name and at least these labels."""
    (sample,) = [
        sample for sample in samples(families) if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return float(sample.value)


def samples(families: Iterable[Metric]) -> Iterable[Sample]:
    return [sample for family in families for sample in family.samples]
