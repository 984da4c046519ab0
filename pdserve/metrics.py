"""Names and values as Prometheus knows them, for what nodes count. The table of all of them is docs/metrics.md."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate


def series(name: str, **labels: str) -> str:
    """``name{label="value",…}``, as in Prometheus' text format."""
    escaped = ((label, _escape(value)) for label, value in labels.items())
    text = ",".join(f'{label}="{value}"' for label, value in escaped)
    return f"{name}{{{text}}}" if text else name


class Histogram:
    """Counts by upper bounds, each inclusive."""

    def __init__(self, name: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # not cumulative; the last is beyond all bounds
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def export(self) -> dict[str, float]:
        totals = list(accumulate(self._counts))
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        buckets = {series(f"{self._name}_bucket", le=le): total for le, total in zip(bounds, totals, strict=True)}
        return {**buckets, f"{self._name}_sum": self._sum, f"{self._name}_count": totals[-1]}


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
