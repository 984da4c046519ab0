"""How all programs declare their Prometheus metrics (MetricSet), with fast histograms, quantiles and series names."""

from __future__ import annotations

import re
import typing
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from types import MappingProxyType

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

disable_created_metrics()  # no creation timestamps

#: A value, or values by the values of the labels.
Reading = float | Mapping[tuple[str, ...], float]

_PARTS = 8  # fine buckets per exported bucket: quantiles are accurate to some 5 %

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PART_OF_HISTOGRAM = re.compile("_(bucket|sum|count)$")
_ESCAPED = re.compile(r"\\(.)")


class FastHistogram(Collector):
    """A histogram for per-token observations from one thread, without locks: a tenth of prometheus_client's cost.

    ``counts`` [len(fine_bounds) + 1] is the input of ``quantile``.
    """

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        """``bounds`` are the inclusive upper bounds of the exported buckets, ascending."""
        self._name = name
        self._documentation = documentation
        self._bounds = list(bounds)
        self.fine_bounds = subdivided(bounds, _PARTS)
        self.counts = [0] * (len(self.fine_bounds) + 1)
        self._sum = 0.0

    def observe(self, amount: float) -> None:
        self.counts[bisect_left(self.fine_bounds, amount)] += 1
        self._sum += amount

    def merge(self, other: FastHistogram) -> None:
        """Add the observations of a histogram with the same bounds."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self._sum += other._sum

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation)
        self.add_to(family, [])
        yield family

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add this histogram as the series with these label values."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        totals = list(accumulate(self.counts))
        totals = [*totals[_PARTS - 1 :: _PARTS], totals[-1]]
        buckets = list(zip(bounds, map(float, totals), strict=True))
        family.add_metric(labels, buckets, self._sum)


class LabeledHistogram(Collector):
    """A FastHistogram per value of a label. ``values`` are exported from the start, others from their first use.

    ``also`` are names of vLLM for single values, with the labels of ``model``.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        label: str,
        bounds: Sequence[float],
        values: Iterable[str] = (),
        also: Mapping[str, str] = MappingProxyType({}),
        model: str = "",
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._label = label
        self._bounds = bounds
        self._also = also
        self._model = model
        self._histograms: dict[str, FastHistogram] = {}
        for value in values:
            self.of(value)

    def of(self, value: str) -> FastHistogram:
        if value not in self._histograms:
            self._histograms[value] = FastHistogram(self._name, self._documentation, self._bounds)
        return self._histograms[value]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=[self._label])
        for value, histogram in list(self._histograms.items()):  # any thread may collect
            histogram.add_to(family, [value])
        yield family
        for value, name in self._also.items():
            family = HistogramMetricFamily(name, self._documentation, labels=MODEL_LABELS)
            self.of(value).add_to(family, model_labels(self._model))
            yield family


#: Labels of series under vLLM's names. A node is one engine with any number of ranks.
MODEL_LABELS = ("model_name", "engine")


def model_labels(model: str) -> tuple[str, str]:
    return model, "0"


class ModelHistogram(Collector):
    """A histogram per model under each name of ``also``, and their sum under ``name``.

    Without ``name`` there is no sum.
    """

    def __init__(self, name: str, documentation: str, bounds: Sequence[float], also: Sequence[str]) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = bounds
        self._also = also
        self._histograms: dict[str, FastHistogram] = {}
        self.fine_bounds = subdivided(bounds, _PARTS)

    def of(self, model: str) -> FastHistogram:
        if model not in self._histograms:
            self._histograms[model] = FastHistogram(self._name, self._documentation, self._bounds)
        return self._histograms[model]

    @property
    def counts(self) -> list[int]:
        return self._sum().counts

    def collect(self) -> Iterator[HistogramMetricFamily]:
        histograms = list(self._histograms.items())  # any thread may collect
        if self._name:
            yield from self._sum().collect()
        for name in self._also:
            family = HistogramMetricFamily(name, self._documentation, labels=MODEL_LABELS)
            for model, histogram in histograms:
                histogram.add_to(family, model_labels(model))
            yield family

    def _sum(self) -> FastHistogram:
        total = FastHistogram(self._name, self._documentation, self._bounds)
        for histogram in list(self._histograms.values()):
            total.merge(histogram)
        return total


class ModelCount:
    """The part of a ModelCounter that belongs to one model. One thread may count."""

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class ModelCounter(Collector):
    """A counter per model under each name of ``also``, and their sum under ``name``."""

    def __init__(self, name: str, documentation: str, also: Sequence[str]) -> None:
        self._name = name
        self._documentation = documentation
        self._also = also
        self._counts: dict[str, ModelCount] = {}

    def of(self, model: str) -> ModelCount:
        return self._counts.setdefault(model, ModelCount())

    def collect(self) -> Iterator[CounterMetricFamily]:
        counts = list(self._counts.items())
        yield CounterMetricFamily(self._name, self._documentation, sum(count.value for _, count in counts))
        for name in self._also:
            family = CounterMetricFamily(name, self._documentation, labels=MODEL_LABELS)
            for model, count in counts:
                family.add_metric(model_labels(model), count.value)
            yield family


class MetricSet(Collector):
    """The metrics of a program. A metric is declared by one call, with its name, meaning and labels.

        self.handoffs = metrics.counter("pdserve_handoffs", "Handoffs begun.")  # then: self.handoffs.inc()
        metrics.read_gauge("pdserve_connections", "Open connections.", lambda: len(connections))

    ``read_…`` is for values that something else counts: ``read`` returns the value, with labels the value of each tuple
    of their values. Names of counters end with ``_total``. ``also`` are names of vLLM for the same values, with
    MODEL_LABELS: of the model that the constructor was given, or that each observation names.

    A row of docs/metrics.md describes each metric;
    tests/e2e/test_exported_metrics.py compares them.
    """

    def __init__(self, model: str = "") -> None:
        self.registry = CollectorRegistry()
        self._model = model

    def model_histogram(
        self, name: str, meaning: str, bounds: Sequence[float], also: Sequence[str] = ()
    ) -> ModelHistogram:
        histogram = ModelHistogram(name, meaning, bounds, also)
        self.registry.register(histogram)
        return histogram

    def model_counter(self, name: str, meaning: str, also: Sequence[str] = ()) -> ModelCounter:
        counter = ModelCounter(name, meaning, also)
        self.registry.register(counter)
        return counter

    def counter(self, name: str, meaning: str, labels: Sequence[str] = (), series: Iterable[str] = ()) -> Counter:
        """``series`` are values of the only label, whose series begin at 0; others begin when they are used."""
        counter = Counter(name, meaning, labels, registry=self.registry)
        for value in series:
            counter.labels(value)
        return counter

    def gauge(self, name: str, meaning: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(name, meaning, labels, registry=self.registry)

    def histogram(self, name: str, meaning: str, bounds: Sequence[float]) -> FastHistogram:
        """One thread may observe."""
        histogram = FastHistogram(name, meaning, bounds)
        self.registry.register(histogram)
        return histogram

    def labeled_histogram(
        self,
        name: str,
        meaning: str,
        label: str,
        bounds: Sequence[float],
        values: Iterable[str] = (),
        also: Mapping[str, str] = MappingProxyType({}),
    ) -> LabeledHistogram:
        histogram = LabeledHistogram(name, meaning, label, bounds, values, also, self._model)
        self.registry.register(histogram)
        return histogram

    def read_counter(
        self,
        name: str,
        meaning: str,
        read: Callable[[], Reading],
        labels: Sequence[str] = (),
        also: Sequence[str] = (),
    ) -> None:
        self._read(CounterMetricFamily, (name, *also), meaning, read, labels)

    def read_gauge(
        self,
        name: str,
        meaning: str,
        read: Callable[[], Reading],
        labels: Sequence[str] = (),
        also: Sequence[str] = (),
    ) -> None:
        self._read(GaugeMetricFamily, (name, *also), meaning, read, labels)

    def _read(
        self,
        family: type[CounterMetricFamily | GaugeMetricFamily],
        names: Sequence[str],
        meaning: str,
        read: Callable[[], Reading],
        labels: Sequence[str],
    ) -> None:
        for name in names:
            model = self._model if is_vllm(name) else None
            self.registry.register(_Read(family, name, meaning, read, labels, model))

    def read_totals(
        self,
        prefix: str,
        record: type[msgspec.Struct],
        read: Callable[[], Mapping[tuple[str, ...], msgspec.Struct]],
        labels: Sequence[str] = (),
        also: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        """Export each field of records as a counter; ``Meta(description=…)`` of the field is its meaning.

        ``also`` has further names by field.
        """

        def values_of(field: str) -> Reading:
            return {values: float(getattr(totals, field)) for values, totals in read().items()}

        for field, hint in typing.get_type_hints(record, include_extras=True).items():
            (meta,) = hint.__metadata__
            names = also.get(field, ())
            self.read_counter(f"{prefix}_{field}", meta.description, partial(values_of, field), labels, names)

    def collect(self) -> Iterable[Metric]:
        return self.registry.collect()


class _Read(Collector):
    """A metric whose values are read when it is exported."""

    def __init__(
        self,
        family: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        meaning: str,
        read: Callable[[], Reading],
        labels: Sequence[str],
        model: str | None,
    ) -> None:
        """``model``: add MODEL_LABELS."""
        self._family = family
        self._name = name
        self._meaning = meaning
        self._read = read
        self._labels = (*labels, *MODEL_LABELS) if model is not None else labels
        self._values = () if model is None else model_labels(model)

    def collect(self) -> Iterator[Metric]:
        family = self._family(self._name, self._meaning, labels=self._labels)
        reading = self._read()
        for values, amount in (reading if isinstance(reading, Mapping) else {(): reading}).items():
            family.add_metric((*values, *self._values), amount)
        yield family


def is_vllm(name: str) -> bool:
    """Return whether a metric's name is one of vLLM."""
    return name.startswith("vllm:")


def subdivided(bounds: Sequence[float], parts: int) -> list[float]:
    """Split each interval into parts of equal ratio; the first, from 0, into parts of equal length."""
    split_bounds: list[float] = []
    low = 0.0
    for high in bounds:
        shares = [part / parts for part in range(1, parts)]
        split_bounds += [low * (high / low) ** share if low else high * share for share in shares]
        split_bounds.append(high)
        low = high
    return split_bounds


def quantile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """Return the value that ``share`` of the observations do not exceed; None without observations.

    Assumes evenly spread values within a bucket. Observations beyond all bounds count as the highest bound.
    """
    rank = share * sum(counts)
    if not rank > 0.0:
        return None
    before = 0.0
    for index, (high, count) in enumerate(zip(bounds, counts, strict=False)):
        if before + count >= rank:
            low = bounds[index - 1] if index else 0.0
            return low + (high - low) * (rank - before) / count
        before += count
    return bounds[-1]


def series(name: str, **labels: str) -> str:
    """Return ``name{label="value",…}``, as in the Prometheus text format."""
    escaped = ((label, _escape(value)) for label, value in labels.items())
    text = ",".join(f'{label}="{value}"' for label, value in escaped)
    return f"{name}{{{text}}}" if text else name


def exposition(values: Mapping[str, float]) -> str:
    """Return values by their ``series`` in the text format of Prometheus, the inverse of ``flat``.

    Types follow from the names: ours end with ``_total`` if they are counters, and with ``_bucket``, ``_sum`` and
    ``_count`` if they are parts of a histogram.
    """
    families: dict[str, list[str]] = {}
    names = {text.partition("{")[0] for text in values}
    for text, value in values.items():
        name = text.partition("{")[0]
        base = _PART_OF_HISTOGRAM.sub("", name)
        family = base if f"{base}_bucket" in names else name
        families.setdefault(family, []).append(f"{text} {floatToGoString(value)}\n")
    lines = []
    for family, samples in families.items():
        kind = "counter" if family.endswith("_total") else "histogram" if f"{family}_bucket" in names else "gauge"
        lines += [f"# TYPE {family} {kind}\n", *samples]
    return "".join(lines)


def labels_of(text: str) -> dict[str, str]:
    """Parse the labels of a ``series`` text."""
    return {label: _ESCAPED.sub(_unescaped, value) for label, value in _LABEL.findall(text)}


def flat(families: Iterable[Metric]) -> dict[str, float]:
    """Return the value of every sample by its series name."""
    return {series(sample.name, **sample.labels): sample.value for family in families for sample in family.samples}


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]
