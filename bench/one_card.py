"""Engines on one GPU, one after the other, with the same requests: latencies, goodput, tokens/s, and misses of 5 %.

    python bench/one_card.py MODEL --results one_card.jsonl --node-flags "--load-format dummy" \\
        --vllm "env HF_HUB_OFFLINE=1 /opt/vllm/bin/vllm serve" --lmdeploy "/opt/lmdeploy/bin/lmdeploy serve api_server"
    python bench/one_card.py MODEL --results one_card.jsonl --systems vllm lmdeploy --loads 4000
    python bench/one_card.py MODEL --results one_card.jsonl --systems                                  the table alone

A system is ``pdserve`` (``pdserve up``), ``unpaced`` (``up --itl-target 0``), ``vllm``, ``lmdeploy``, or ``NAME=FLEET``
with a fleet of bench/goodput_fleets.py: ``"seqs=up --max-num-seqs 512"``. ``pdserve`` and ``unpaced`` accept as many
waiting requests as the loads have: the other engines have no limit.

A load is ``RATE/s[:IN:OUT]``, requests that arrive as a Poisson process for ``--seconds``, or ``COUNT[:IN:OUT]``,
requests that are all sent at once. IN and OUT are mean tokens of lognormal lengths, by default 2000:200, or 512:256 for
requests at once.

``--results`` receives a JSON line after each load. Lines that it has already are not measured again, so a run that was
cut off at ``--time-limit`` or ``--system-limit`` goes on where it ended. The table has a row per load and a column per
system: TTFT p50/p90/p99; time per token p50/p90/p99; longest gap p50/p99, ms; output tokens/s; share of requests within
``--goodput``. A row of requests at once has the seconds until the last one has ended, TTFT p50, and output tokens/s.
Below it stands each figure in which the first system is more than 5 % behind the best of ``--against``.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop
from goodput import Result, add_measurement_flags, measure, parse_objectives, shares
from goodput_fleets import FleetError, add_start_flags, check_fleet, running
from loads import Load, add_request_flags, random_load

from cli.bench.http_load import ServerError
from pdserve.errors import ConfigError, shown
from pdserve.flags.value_types import positive_int
from pdserve.host.process import run_command

UP = "up --max-model-len {length} --max-inflight 8192 --max-queue 8192 --max-waiting 8192"
SYSTEMS = {
    "pdserve": UP,
    "unpaced": f"{UP} --itl-target 0",
    "vllm": "vllm --max-model-len {length} --disable-uvicorn-access-log",
    # The default of its batch is smaller, and each warning costs it time.
    "lmdeploy": "lmdeploy --session-len {length} --max-batch-size 1024 --cache-max-entry-count 0.85 "
    "--disable-metrics --log-level ERROR --generation-config lmdeploy",
}
LOADS = ("4/s", "8/s", "12/s", "16/s", "10/s:512:512", "2.5/s:8000:100", "422", "1000", "4000")
LOAD = re.compile(r"(\d+(?:\.\d+)?)(/s)?(?::(\d+):(\d+))?")
SIGMA = 0.8
WARMUP_RATE = 16.0  # requests/s
MARGIN = 0.05


class Row(msgspec.Struct):
    """A line of --results."""

    seed: int
    result: Result


class Figure(NamedTuple):
    """A figure of a result; ``sign`` is -1 if more is better."""

    name: str
    value: Callable[[Result], float]
    sign: int = 1


def _percentile(name: str, field: str, p: int) -> Figure:
    return Figure(f"{name} p{p}", lambda result: getattr(result, field).get(f"p{p}", math.nan))


GOODPUT = Figure("within objectives", lambda result: result.goodput, -1)
SECONDS = Figure("seconds for all", lambda result: result.seconds)
FIGURES = (
    *(_percentile("TTFT", "ttft_ms", p) for p in (50, 90, 99)),
    *(_percentile("per token", "tpot_ms", p) for p in (50, 90, 99)),
    *(_percentile("longest gap", "gap_ms", p) for p in (50, 99)),
    GOODPUT,
)


def parse_load(text: str, args: argparse.Namespace) -> Load:
    """Return a load of LOAD's form. Raises ConfigError."""
    match = LOAD.fullmatch(text)
    if match is None or not 0 < float(match[1]) <= 1e6 or (not match[2] and "." in match[1]):
        raise ConfigError(f"--loads {shown(text)} is invalid; use RATE/s[:IN:OUT] or COUNT[:IN:OUT]")
    rate = float(match[1]) if match[2] else math.inf
    count = max(2, round(rate * args.seconds)) if match[2] else int(match[1])
    means = (match[3], match[4]) if match[3] else (("2000", "200") if match[2] else ("512", "256"))
    lengths = f"mean={means[0]},sigma={SIGMA}", f"mean={means[1]},sigma={SIGMA}"
    return random_load(args, rate, count, text, lengths)


def parse_system(text: str, max_model_len: int) -> tuple[str, str]:
    """Return the name and the fleet of a system. Raises ConfigError."""
    name, _, fleet = text.partition("=")
    if not fleet and name not in SYSTEMS:
        raise ConfigError(f"--systems {shown(text)} is invalid; use {', '.join(SYSTEMS)} or NAME=FLEET")
    fleet = fleet or SYSTEMS[name].format(length=max_model_len)
    check_fleet("--systems", fleet)
    return name, fleet


class Results:
    """The rows of --results, which gets further ones as they come."""

    def __init__(self, path: Path, seed: int) -> None:
        """Raises ConfigError for a file with other lines."""
        self.results: list[Result] = []
        self._path = path
        self._seed = seed
        try:
            lines = path.read_bytes().splitlines() if path.exists() else []
            rows = [msgspec.json.decode(line, type=Row) for line in lines]
        except (OSError, msgspec.DecodeError) as exc:
            raise ConfigError(f"--results {path} cannot be continued: {exc}; name another file") from exc
        self.results += [row.result for row in rows if row.seed == seed]

    def add(self, result: Result) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(Row(self._seed, result)) + b"\n")
        self.results.append(result)

    def lacks(self, system: str, load: Load) -> bool:
        measured = ((result.system, result.load, result.requests) for result in self.results)
        return (system, load.name, len(load.requests)) not in measured


def measure_systems(systems: dict[str, str], loads: Sequence[Load], results: Results, args: argparse.Namespace) -> int:
    """Measure what ``results`` lacks; return how many systems failed or met a time limit."""
    warmup = random_load(args, WARMUP_RATE, args.warmup, "warm-up", ("mean=2000,sigma=0.8", "mean=100,sigma=0.8"))
    end = time.monotonic() + args.time_limit
    failed = 0
    for name, fleet in systems.items():
        missing = [load for load in loads if results.lacks(name, load)]
        limit = min(end, time.monotonic() + args.system_limit)
        if not missing:
            continue
        try:
            if time.monotonic() > end:
                raise TimeoutError
            with running(fleet, args, name) as system:
                left = max(0.0, limit - time.monotonic())
                print(f"{name} is ready, {left:.0f} s are left for it", file=sys.stderr, flush=True)
                uvloop.run(asyncio.wait_for(measure(system, [warmup, *missing], args, results.add), left))
        except (FleetError, ServerError) as exc:
            print(f"{name}: error: {exc}", file=sys.stderr, flush=True)
            failed += 1
        except TimeoutError:
            print(f"{name}: its time has passed; repeat the command to go on", file=sys.stderr, flush=True)
            failed += 1
    return failed


def cell(result: Result | None) -> str:
    if result is None:
        return ""
    errors = f"; {result.errors} errors" if result.errors else ""
    if result.rate is None:
        first = f"{result.ttft_ms['p50'] / 1e3:.1f} s" if result.ttft_ms else "–"
        return f"{result.seconds:.1f} s; {first}; {result.output_tokens_per_s:,.0f}{errors}"
    gaps = " / ".join(f"{result.gap_ms[f'p{p}']:,.0f}" for p in (50, 99)) if result.gap_ms else "–"
    latencies = f"{shares(result.ttft_ms)}; {shares(result.tpot_ms, 1)}; {gaps}"
    late = " (client late)" if result.warning else ""
    return f"{latencies}; {result.output_tokens_per_s:,.0f}; {100 * result.goodput:.1f} %{errors}{late}"


def by_load(results: Sequence[Result]) -> dict[str, dict[str, Result]]:
    """Return the results by load and system, in the order of their first measurement."""
    loads: dict[str, dict[str, Result]] = {}
    for result in results:
        loads.setdefault(result.load, {})[result.system] = result
    return loads


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table with a row per load and a column per system."""
    names = dict.fromkeys(result.system for result in results)
    lines = [f"| load | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for load, measured in by_load(results).items():
        lines.append(f"| {load} | {' | '.join(cell(measured.get(name)) for name in names)} |")
    return "\n".join(lines)


def misses(results: Sequence[Result], own: str, rivals: Sequence[str]) -> list[str]:
    """Return a line for each figure in which the system ``own`` is more than MARGIN worse than the best rival."""
    lines = []
    for load, measured in by_load(results).items():
        others = [measured[name] for name in rivals if name in measured]
        mine = measured.get(own)
        if mine is None or not others:
            continue
        for figure in (SECONDS,) if mine.rate is None else FIGURES:
            best = min(others, key=lambda result: figure.sign * figure.value(result))
            value = figure.value(mine)
            target = figure.value(best)
            if figure.sign * value > figure.sign * target * (1 + figure.sign * MARGIN):
                change = f"{value / target - 1:+.0%}" if target else "–"
                lines.append(f"{load}, {figure.name}: {value:,.4g} / {target:,.4g} of {best.system} ({change})")
    return lines


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_dir", metavar="MODEL", help="checkpoint")
    names = f"{', '.join(SYSTEMS)} (default: all four) or NAME=FLEET; none: print the table"
    parser.add_argument("--systems", nargs="*", default=[*SYSTEMS], metavar="SYSTEM", help=names)
    parser.add_argument("--against", nargs="+", default=["vllm", "lmdeploy"], metavar="NAME", help="systems to beat")
    loads = f"RATE/s[:IN:OUT] or COUNT[:IN:OUT] (default: {' '.join(LOADS)})"
    parser.add_argument("--loads", nargs="+", default=[*LOADS], metavar="LOAD", help=loads)
    parser.add_argument(
        "--results", type=Path, default=Path("one_card.jsonl"), metavar="FILE", help="gets a line a load"
    )
    parser.add_argument("--gpu", metavar="N", help="CUDA_VISIBLE_DEVICES of all systems (default: as it is)")
    parser.add_argument(
        "--system-limit", type=float, default=math.inf, metavar="S", help="of each system, with its start"
    )
    parser.add_argument("--time-limit", type=float, default=570.0, metavar="S", help="of the whole run")
    length = "of the four systems, in tokens (default %(default)s)"
    parser.add_argument("--max-model-len", type=positive_int, default=16384, metavar="N", help=length)
    add_start_flags(parser)
    add_measurement_flags(parser)
    add_request_flags(parser)
    parser.set_defaults(seconds=12.0, timeout=600.0, devices=["cuda:0"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    args = parser.parse_args(argv)
    args.goodput = parse_objectives(args.goodput)
    systems = dict(parse_system(text, args.max_model_len) for text in args.systems)
    loads = [parse_load(text, args) for text in args.loads]
    results = Results(args.results, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = args.gpu
    failed = measure_systems(systems, loads, results, args)
    print(table(results.results))
    own = next(iter(systems), "pdserve")
    print("\n".join(["", f"{own} is more than {MARGIN:.0%} behind in:", *misses(results.results, own, args.against)]))
    return 1 if failed or any(result.errors for result in results.results) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # stops the processes
    sys.exit(run_command(main))
