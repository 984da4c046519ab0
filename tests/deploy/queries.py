"""Check queries of alerts, dashboards and scaling against the table of docs/metrics.md."""

from __future__ import annotations

import re
from typing import Any

import promql_parser as promql
from exposition import Row, documented_metrics

from router.metrics import RouterMetrics

ROLES = {"router": "R", "prefill": "P", "decode": "D", "both": "PD"}  # component → letters in the table
SCRAPED = frozenset({"namespace", "pod", "instance", "job", "component"})  # labels that come with scraping
ROWS = {name: row for row in documented_metrics() for name in row.series}
_BUCKETS = set(re.findall(r'^(\w+_bucket{)(?:.*,)?(le=".*?")', RouterMetrics().export().decode(), re.MULTILINE))


def check_query(query: str) -> None:
    """Fail unless the query parses and uses existing metrics, labels, roles and label values.

    What Grafana puts in for its variables may stand in it.
    """
    parsed = promql.parse(query.replace("$__rate_interval", "5m"))
    nodes: list[Any] = []
    promql.walk(parsed, nodes.append)
    selectors = [node.vector_selector if isinstance(node, promql.MatrixSelector) else node for node in nodes]
    selectors = [node for node in selectors if isinstance(node, promql.VectorSelector)]
    labels = set(SCRAPED)
    for selector in selectors:
        labels |= _check_selector(selector)
    for node in nodes:
        assert _labels_of(node) <= labels, f"{query}: of {_labels_of(node)} only {labels} are there"


def _check_selector(selector: promql.VectorSelector) -> set[str]:
    """Return the labels of a metric."""
    matchers = selector.matchers.matchers
    if selector.name == "up":  # Prometheus' own
        assert {matcher.name for matcher in matchers} <= SCRAPED
        return set()
    name = selector.name or ""  # which says nothing of what it asks for
    row = ROWS[name]
    labels = set(row.series[name])
    for matcher in matchers:
        assert matcher.name in labels | SCRAPED, f"{name} has no label {matcher.name}"
        values = matcher.value.split("|")
        if matcher.name == "component":
            assert all({*ROLES[value]} & {*row.on} for value in values), f"{name} is not on {matcher.value}"
        elif matcher.name == "le":
            assert (name + "{", f'le="{matcher.value}"') in _BUCKETS
        elif matcher.name in labels:
            _check_values(row, matcher.name, values)
    return labels


def _check_values(row: Row, label: str, values: list[str]) -> None:
    """Fail unless the table lists the label value."""
    for value in values:
        assert re.search(rf"\b{value}\b", row.meaning), f"{row.name}: {label} is never {value}"


def _labels_of(node: Any) -> set[str]:
    """Return the labels that a query groups by or matches on."""
    modifier = getattr(node, "modifier", None)
    if isinstance(node, promql.AggregateExpr) and modifier is not None:
        return set(modifier.labels)
    if isinstance(node, promql.BinaryExpr) and modifier is not None:
        matching = set(modifier.matching.labels) if modifier.matching is not None else set()
        return matching | set(modifier.group_labels or ())
    return set()
