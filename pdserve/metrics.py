"""What processes export to Prometheus beyond what prometheus_client has. All metrics are in docs/metrics.md."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally(Collector):
    """A histogram that is told of every token: a tenth of the price of prometheus_client's, which locks twice for each.

    For one thread.
    """

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        """``bounds`` are the upper ones of buckets, ascending, each inclusive."""
        self._name, self._documentation = name, documentation
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)  # not cumulative; the last is beyond all bounds
        self._sum = 0.0

    def observe(self, amount: float) -> None:
        self._counts[bisect_left(self._bounds, amount)] += 1
        self._sum += amount

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation)
        self.add_to(family, [])
        yield family

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """As the series with these values of the family's labels."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family.add_metric(labels, buckets, self._sum)


class Tallies(Collector):
    """A tally for each value of a label."""

    def __init__(
        self, name: str, documentation: str, label: str, values: Iterable[str], bounds: Sequence[float]
    ) -> None:
        self._name, self._documentation, self._label = name, documentation, label
        self._tallies = {value: Tally(name, documentation, bounds) for value in values}

    def observe(self, value: str, amount: float) -> None:
        self._tallies[value].observe(amount)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=[self._label])
        for value, tally in self._tallies.items():
            tally.add_to(family, [value])
        yield family


def series(name: str, **labels: str) -> str:
    """``name{label="value",…}``, as in Prometheus' text format."""
    escaped = ((label, _escape(value)) for label, value in labels.items())
    text = ",".join(f'{label}="{value}"' for label, value in escaped)
    return f"{name}{{{text}}}" if text else name


def flat(families: Iterable[Metric]) -> dict[str, float]:
    """Every sample by its series."""
    return {series(sample.name, **sample.labels): sample.value for family in families for sample in family.samples}


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
