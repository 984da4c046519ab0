"""The report of a load: figures, a table and histograms for a terminal, and a plot for a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.bench.http_load import PERCENTILES, Trace, percentiles
from cli.bench.requests import Request
from cli.numbers import UNKNOWN, count, percent, rate, seconds
from pdserve.errors import ConfigError

_BINS = 8  # bins of a histogram
_BAR = 40  # columns
_UNSAID = "the server does not say"


@dataclass(frozen=True)
class Report:
    """A run: ``requests`` belong to ``traces``, one to one."""

    server: str
    load: str
    seed: int
    seconds: float
    traces: Sequence[Trace]
    requests: Sequence[Request]

    @property
    def good(self) -> list[Trace]:
        return [trace for trace in self.traces if not trace.error]

    @property
    def failed(self) -> int:
        return len(self.traces) - len(self.good)

    @property
    def errors(self) -> list[str]:
        return sorted({trace.error for trace in self.traces if trace.error})[:5]

    @property
    def ended_early(self) -> int:
        """Answers with fewer tokens than requested: the server does not know ``ignore_eos``."""
        pairs = zip(self.traces, self.requests, strict=True)
        return sum(not trace.error and trace.num_tokens < request.num_tokens for trace, request in pairs)

    @property
    def prompt_tokens(self) -> int:
        pairs = zip(self.traces, self.requests, strict=True)
        return sum(trace.prompt_tokens or request.size for trace, request in pairs if not trace.error)

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens from the prefix cache; None if the server does not report them."""
        counts = [trace.cached_tokens for trace in self.good if trace.reports_cache]
        return sum(counts) if counts else None

    @property
    def images(self) -> int:
        pairs = zip(self.traces, self.requests, strict=True)
        return sum(len(request.images) for trace, request in pairs if not trace.error)

    @property
    def image_tokens(self) -> int | None:
        """Prompt tokens that are images; None if the server does not report them."""
        counts = [trace.image_tokens for trace in self.good if trace.image_tokens is not None]
        return sum(counts) if counts else None

    @property
    def output_tokens(self) -> int:
        return sum(trace.num_tokens for trace in self.good)

    def series(self) -> dict[str, list[float]]:
        """Return times in seconds by their names."""
        return {
            "TTFT": [trace.ttft for trace in self.good],
            "ITL": [gap for trace in self.good for gap in trace.gaps],
            "E2E": [trace.tokens[-1] - trace.start for trace in self.good],
        }

    def figures(self) -> dict[str, Any]:
        """Return all figures for JSON; times in ms, unless the key says otherwise."""
        return {
            "server": self.server,
            "load": self.load,
            "seed": self.seed,
            "requests": len(self.traces),
            "failed": self.failed,
            "errors": self.errors,
            "ended_early": self.ended_early,
            "seconds": round(self.seconds, 3),
            "requests_per_s": round(len(self.good) / self.seconds, 3),
            "output_tokens_per_s": round(self.output_tokens / self.seconds, 1),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "images": self.images,
            "image_tokens": self.image_tokens,
            **{f"{name.lower()}_ms": percentiles(values) for name, values in self.series().items()},
        }


def show(report: Report, console: Console) -> None:
    """Print the table and the histograms of TTFT and ITL."""
    console.print(Text(f"\n{report.server}", "bold"), soft_wrap=True)
    console.print(Text(f"{report.load}\n", "dim"), soft_wrap=True)
    for error in report.errors:
        console.print(Text(f"failed: {error}", "red"), soft_wrap=True)
    if report.good:
        console.print(_latencies(report), _throughput(report))
        for name in ("TTFT", "ITL"):
            if values := report.series()[name]:
                console.print(_histogram(name, values))


def _latencies(report: Report) -> Table:
    table = Table("", *(f"p{p}" for p in PERCENTILES), "max", box=None, header_style="dim")
    for column in table.columns[1:]:
        column.justify = "right"
    labels = {"TTFT": "time to first token", "ITL": "between tokens", "E2E": "whole request"}
    for name, values in report.series().items():
        figures = percentiles(values).values()
        cells = [seconds(figure / 1e3) for figure in figures] or [UNKNOWN] * (len(PERCENTILES) + 1)
        table.add_row(f"{name}, {labels[name]}", *cells)
    return table


def _throughput(report: Report) -> Table:
    table = Table(box=None, show_header=False)
    good = len(report.good)
    cached = report.cached_tokens
    table.add_row(
        "requests", f"{good:,} of {len(report.traces):,} in {seconds(report.seconds)}, {rate(good / report.seconds)}/s"
    )
    table.add_row("output", f"{count(report.output_tokens)} tokens, {rate(report.output_tokens / report.seconds)}/s")
    table.add_row("prompts", f"{count(report.prompt_tokens)} tokens, {rate(report.prompt_tokens / report.seconds)}/s")
    share = _UNSAID
    if report.images:
        tokens = report.image_tokens
        said = _UNSAID if tokens is None else f"{count(tokens)} of the prompts' tokens"
        table.add_row("images", f"{count(report.images)}, {rate(report.images / report.seconds)}/s: {said}")
    if cached is not None:
        share = (
            f"{count(cached)} of {count(report.prompt_tokens)} prompt tokens, {percent(cached / report.prompt_tokens)}"
        )
    table.add_row("prefix cache", share)
    if report.ended_early:
        table.add_row("ended early", f"{report.ended_early:,} answers; the server ignores ignore_eos")
    return table


def _histogram(name: str, values: Sequence[float]) -> Table:
    """Return a table with a bar per bin; bins are equal on a logarithmic axis."""
    table = Table(title=f"\n{name}", title_justify="left", title_style="bold", box=None, show_header=False)
    for justify in ("right", "left", "right"):
        table.add_column(justify=justify, no_wrap=True)
    counts = bins(values)
    highest = max(number for _, _, number in counts)
    for low, high, number in counts:
        bar = Bar(highest, 0, number, width=_BAR, color="cyan")
        label = f"{seconds(low)} – {seconds(high)}" if low else f"up to {seconds(high)}"
        table.add_row(label, bar, percent(number / len(values)))
    return table


def bins(values: Sequence[float]) -> list[tuple[float, float, int]]:
    """Return (low, high, number of values) of bins with a constant ratio up to the greatest value.

    The first bin begins at 0: tokens that arrive together have gaps of microseconds.
    """
    low = _least(values)
    high = max(*values, 1e-6)
    if high <= low * 1.001:
        return [(0.0, high, len(values))]
    ratio = (high / low) ** (1 / _BINS)
    counts = [0] * _BINS
    for value in values:
        counts[min(_BINS - 1, int(math.log(max(value, low) / low, ratio)))] += 1
    return [(low * ratio**i if i else 0.0, low * ratio ** (i + 1), number) for i, number in enumerate(counts)]


def _least(values: Sequence[float]) -> float:
    """Return where an axis begins: a few smaller values are noise."""
    return max(sorted(values)[len(values) // 20], 1e-6)


def check_plot() -> None:
    """Raises ConfigError without matplotlib."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with `pip install matplotlib`")


def draw(report: Report, path: Path) -> None:
    """Draw the cumulative distributions of TTFT and ITL. Raises OSError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogFormatter

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, name in zip(axes, ("TTFT", "ITL"), strict=True):
        ordered = sorted(value * 1e3 for value in report.series()[name])
        axis.step(ordered, [100 * (i + 1) / len(ordered) for i in range(len(ordered))], where="post")
        axis.set(xlabel=f"{name}, ms", ylabel="% of requests" if name == "TTFT" else "% of gaps", ylim=(0, 101))
        axis.set_xscale("log")
        axis.set_xlim(left=0.9e3 * _least(report.series()[name]))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
        axis.grid(alpha=0.3, which="both")
    figure.suptitle(f"{report.server}\n{report.load}", fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
