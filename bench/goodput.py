"""Goodput of OpenAI-compatible servers under open-loop load: latencies, and the share of requests within objectives.

    python bench/goodput.py --rates 8,16,24 --system pdserve=http://127.0.0.1:8000 \\
        --system vllm=http://127.0.0.1:8100,http://127.0.0.1:8101 --system lmdeploy=lmdeploy:http://127.0.0.1:8200
    python bench/goodput.py --rates 16 --system vllm=vllm-pd:http://127.0.0.1:8100,http://127.0.0.1:8101
    python bench/goodput.py --trace conversation_trace.jsonl --requests 500 --system pdserve=http://127.0.0.1:8000

A system has one URL, several that take requests round-robin, or is ``vllm-pd:P,D``: vLLM's prefill and decode server
with the NIXL connector, whose ``kv_transfer_params`` this client hands over. ``lmdeploy:URL`` is LMDeploy, which takes
token ids at ``/generate`` only. Systems are measured one after the other with the same requests. A cache salt per
measurement keeps prompts out of prefix caches that earlier ones have filled.

Requests arrive as a Poisson process or at the times of a trace in Mooncake's format, scaled to ``--rates``. Each has a
fixed number of output tokens (``ignore_eos``). Per request: TTFT from sending to the first token, the mean time per
output token (TPOT) after it, and the longest gap between two tokens. ``--goodput`` sets their limits in ms; a request
with an error is not within them. Output tokens/s count from the first request to the end of the last one.

If the client itself is too slow, it prints a warning: requests were sent late, or it used almost a whole core.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop
from loads import Load, add_load_flags, make_loads, open_loop, random_load
from systems import SYSTEMS, System

from cli.bench.http_load import PERCENTILES, ServerError, Trace, first_model, percentiles
from pdserve.errors import ConfigError, shown
from pdserve.flags.value_types import positive_int
from pdserve.host.process import run_command

LATE = 0.010  # seconds; a client whose p99 is later distorts the figures
BUSY = 0.9  # CPU seconds per second of a client that cannot keep up
OBJECTIVES = ("ttft", "tpot", "gap")


@dataclass(frozen=True)
class Result:
    """Figures of a system at a rate; times in ms, each a dict of percentiles and the maximum."""

    system: str
    load: str
    rate: float | None  # requests/s; None: all at once
    requests: int
    errors: int
    first_error: str
    seconds: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    gap_ms: dict[str, float]  # longest gap of each request
    second_ms: dict[str, float]  # from the first to the second token
    e2el_ms: dict[str, float]
    late_ms: dict[str, float]  # requests sent after their time
    client_cpu: float  # CPU seconds per second
    output_tokens_per_s: float
    cached_tokens: int
    goodput: float  # share of requests within the objectives

    @property
    def warning(self) -> str:
        """Say why the client distorts the figures; empty if it does not."""
        late = self.late_ms["p99"] if self.rate is not None else 0.0  # no client sends all at once
        if late > 1e3 * LATE or self.client_cpu > BUSY:
            return f"the client could not keep up (sent {late:.0f} ms late at p99, {self.client_cpu:.0%} of a core)"
        return ""


def _tpot(trace: Trace) -> float:
    """Return the mean time per output token after the first one; needs two tokens."""
    return (trace.tokens[-1] - trace.tokens[0]) / (trace.num_tokens - 1)


def is_good(trace: Trace, objectives: dict[str, float]) -> bool:
    """Return whether a request ended without error and within all objectives (ms)."""
    if trace.error:
        return False
    figures = {"ttft": trace.ttft, "tpot": 0.0, "gap": 0.0}
    if trace.gaps:
        figures |= {"tpot": _tpot(trace), "gap": max(trace.gaps)}
    return all(1e3 * figures[name] <= limit for name, limit in objectives.items())


def summarize(
    system: str, load: Load, traces: list[Trace], took: tuple[float, float], objectives: dict[str, float]
) -> Result:
    """``took``: seconds and CPU seconds of the run."""
    ended = [trace for trace in traces if not trace.error]
    gaps = [trace.gaps for trace in ended if trace.gaps]
    seconds, cpu = took
    return Result(
        system=system,
        load=load.name,
        rate=load.rate if math.isfinite(load.rate) else None,
        requests=len(traces),
        errors=len(traces) - len(ended),
        first_error=next((trace.error for trace in traces if trace.error), ""),
        seconds=round(seconds, 3),
        ttft_ms=percentiles(trace.ttft for trace in ended),
        tpot_ms=percentiles(_tpot(trace) for trace in ended if trace.gaps),
        gap_ms=percentiles(map(max, gaps)),
        second_ms=percentiles(seconds[0] for seconds in gaps),
        e2el_ms=percentiles(trace.tokens[-1] - trace.start for trace in ended),
        late_ms=percentiles(trace.start - trace.due for trace in traces),
        client_cpu=round(cpu / seconds, 3),
        output_tokens_per_s=round(sum(trace.num_tokens for trace in ended) / seconds, 1),
        cached_tokens=sum(trace.cached_tokens for trace in ended),
        goodput=round(sum(is_good(trace, objectives) for trace in traces) / len(traces), 4),
    )


async def run_load(system: System, model: str, load: Load, timeout: float) -> list[Trace]:
    salt = uuid.uuid4().hex
    bodies = [system.body(model, request, salt) for request in load.requests]

    async def send(number: int, trace: Trace) -> None:
        await system.complete(number, bodies[number], load.requests[number].num_tokens, trace, timeout)

    return await open_loop(load.requests, send)


async def measure(
    system: System, loads: Sequence[Load], args: argparse.Namespace, report: Callable[[Result], None]
) -> None:
    """Send the first load as a warm-up; report the result at each other load.

    Raises ServerError if the system serves no request of the warm-up.
    """
    model = args.model or await first_model(system.endpoints[0])
    warmup, *loads = loads
    warm = await run_load(system, model, warmup, args.timeout)
    if all(trace.error for trace in warm):
        raise ServerError(f"every request of the warm-up failed, the first one with: {warm[0].error}")
    for load in loads:
        gc.collect()
        gc.disable()  # no pauses between a token's arrival and its time
        began = time.perf_counter()
        cpu = time.process_time()
        try:
            traces = await run_load(system, model, load, args.timeout)
        finally:
            gc.enable()
        took = time.perf_counter() - began, time.process_time() - cpu
        result = summarize(system.name, load, traces, took, args.goodput)
        print(progress(result), file=sys.stderr, flush=True)
        report(result)


class Report:
    """The results so far, which ``--json`` gets after each measurement."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.results: list[Result] = []
        self._args = args

    def add(self, result: Result) -> None:
        self.results.append(result)
        if self._args.json:
            content = {"load": load_text(self._args), "results": [*map(asdict, self.results)]}
            self._args.json.write_text(json.dumps(content, indent=2))


def with_warmup(loads: Sequence[Load], args: argparse.Namespace) -> list[Load]:
    """Return the loads after a warm-up, whose requests come at the lowest rate of all."""
    return [random_load(args, min(load.rate for load in loads), args.warmup, "warm-up"), *loads]


def load_text(args: argparse.Namespace) -> str:
    """Return one line that describes the load and the objectives."""
    limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in args.goodput.items())
    lengths = f"{args.prompt_tokens} in, {args.output_tokens} out, Poisson arrivals for {args.seconds:g} s"
    return f"{args.trace or lengths}; seed {args.seed}; objectives: {limits}"


def progress(result: Result) -> str:
    text = f"{result.system}, load {result.load}: {result.requests} requests in {result.seconds:.1f} s, TTFT "
    text += f"{shares(result.ttft_ms)}, per token {shares(result.tpot_ms, 1)}, longest gap {shares(result.gap_ms)} ms, "
    text += f"{result.output_tokens_per_s:.0f} tokens/s, {result.goodput:.0%} within objectives"
    if result.errors:
        text += f", {result.errors} errors, the first one: {result.first_error}"
    return text + (f"\nWARNING: {result.warning}" if result.warning else "")


def shares(figures: dict[str, float], digits: int = 0) -> str:
    return " / ".join(f"{figures[f'p{p}']:.{digits}f}" for p in PERCENTILES) if figures else "–"


def table(results: Sequence[Result], names: Sequence[str]) -> str:
    """Return a Markdown table: a row per rate and figure, a column per system."""
    by_place = {(result.load, result.system): result for result in results}
    lines = [f"| requests/s | p50 / p90 / p99 | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for load in dict.fromkeys(result.load for result in results):
        row_results = [by_place.get((load, name)) for name in names]
        rows = {
            "TTFT, ms": [r and shares(r.ttft_ms) for r in row_results],
            "per token, ms": [r and shares(r.tpot_ms, 1) for r in row_results],
            "first to second token, ms": [r and shares(r.second_ms) for r in row_results],
            "longest gap, ms": [r and shares(r.gap_ms) for r in row_results],
            "output tokens/s": [r and f"{r.output_tokens_per_s:,.0f}" for r in row_results],
            "within objectives": [r and f"{r.goodput:.1%}" for r in row_results],
            "errors": [r and f"{r.errors} of {r.requests}" for r in row_results],
            "sent late, p99 ms": [r and f"{r.late_ms['p99']:.1f}{' (!)' * bool(r.warning)}" for r in row_results],
        }
        for row, (name, cells) in enumerate(rows.items()):
            lines.append(f"| {'' if row else load} | {name} | {' | '.join(cell or '' for cell in cells)} |")
    return "\n".join(lines)


def parse_objectives(texts: Sequence[str]) -> dict[str, float]:
    """Parse KEY:MS words as ``vllm bench serve --goodput`` does. Raises ConfigError."""
    objectives = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            objectives[name] = float(limit)
        except ValueError:
            name = ""
        if name not in OBJECTIVES:
            raise ConfigError(f"--goodput {shown(text)} is invalid; use {', '.join(f'{o}:MS' for o in OBJECTIVES)}")
    return objectives


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", action="append", default=[], metavar="SYSTEM", help=SYSTEMS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures, after each measurement")
    add_measurement_flags(parser)
    add_load_flags(parser)


def add_measurement_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="default: the first model that a system lists")
    goodput = "objectives per request in ms: ttft:MS, tpot:MS, gap:MS (default: ttft:500 tpot:20)"
    parser.add_argument("--goodput", nargs="+", default=["ttft:500", "tpot:20"], metavar="KEY:MS", help=goodput)
    parser.add_argument("--warmup", type=positive_int, default=32, metavar="N", help="requests before a measurement")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds per request")


async def run(systems: Sequence[System], loads: Sequence[Load], args: argparse.Namespace, report: Report) -> int:
    """Measure the systems; return how many did not serve."""
    failed = 0
    for system in systems:
        try:
            await measure(system, loads, args, report.add)
        except ServerError as exc:
            print(f"{system.name}: error: {exc}", file=sys.stderr, flush=True)
            failed += 1
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    args = parser.parse_args(argv)
    args.goodput = parse_objectives(args.goodput)
    systems = [System.of(text) for text in args.system]
    if not systems or len({system.name for system in systems}) < len(systems):
        raise ConfigError("give one or more --system with different names")
    report = Report(args)
    failed = uvloop.run(run(systems, with_warmup(make_loads(args), args), args, report))
    print(f"{load_text(args)}\n\n{table(report.results, [system.name for system in systems])}")
    return 1 if failed or any(result.errors for result in report.results) else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
