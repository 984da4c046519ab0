"""Predictions of ``pdserve plan`` compared with fleets: measured ones, simulated nodes with equal costs, or CPU nodes.

    PYTHONPATH=.:tests/support python bench/plan_check.py --measured
    PYTHONPATH=.:tests/support python bench/plan_check.py
    PYTHONPATH=.:tests/support python bench/plan_check.py --model MODEL --costs costs.toml --workload 256-512:32:1:1:2

``--measured`` compares with the table "Under load" of docs/numbers.md, for the same requests; it runs anywhere.

Each workload is PROMPT:OUTPUT:P:D:RATE, with lengths as in ``pdserve plan``; with P = 0 each D also prefills. A real
router routes the requests of an open-loop load with random arrivals; the prediction is for exactly these requests.
Simulated nodes have the costs of an 8B model on an H200, ``--slower`` times as long, so that nodes, router and clients
need few CPU cycles; printed times are divided by ``--slower``.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from fleet import MODEL_NAME, Fleet
from loads import Load, add_load_flags, make_load, make_loads, open_loop
from replay import VOCABULARY, make_long_model

from cli.bench.http_load import Endpoint, Trace, complete
from cli.bench.requests import Request, completion_body, random_prompt
from cli.numbers import percentile
from cli.plan.costs import Costs, Shape, load_costs
from cli.plan.prediction import Layout, LoadLimits, virtual_fleet
from cli.plan.workload import Workload, workload_of
from cli.virtual_fleet.jobs import Job
from pdserve.config.simulated_costs import KV_TOKENS, StepTokens, choose_costs
from pdserve.model.model_config import load_model_config

WORKLOADS = (
    "p50=1500,p99=8000:p50=150,p99=600:2:2:28",
    "p50=4000,p99=16000:p50=40,p99=200:3:1:18",
    "p50=400,p99=2000:p50=300,p99=900:1:1:36",
    "p50=1500,p99=8000:p50=150,p99=600:0:4:28",
)
SHARES = (50, 90)  # percentiles of TTFT; a few hundred requests give no reliable p99
NUMBERS = Path(__file__).parents[1] / "docs" / "numbers.md"
#: The columns of the table, and the flags of its loads.
MEASURED_FLEETS = {"elastic": Layout(both=2), "two D": Layout(decode=2), "1P1D": Layout(1, 1)}
MEASURED_LOADS = (
    "--seed 5 --seconds 20 --rates 8,16,24,28,32 --also 20:mean=512,sigma=0.8:mean=512,sigma=0.8 "
    "--also 5:mean=8000,sigma=0.8:mean=100,sigma=0.8"
)


def simulated_costs(model: Path, slower: float) -> Costs:
    """Return the costs of pdserve/config/simulated_costs.py in the format of ``pdserve plan``."""
    costs = choose_costs([], 1.0 / slower)

    def prompt(tokens: int) -> float:
        return costs.seconds(StepTokens(prompt_tokens=tokens, prompt_context=tokens * tokens / 2))

    read_ms = 3.0 + 1e3 * costs.of_read(0)
    return Costs(
        model="simulated",
        gpu="none",
        hardware="none",
        commit="",
        command="",
        shape=Shape.of(load_model_config(model)),
        prefill_ms=tuple((n, 1e3 * prompt(n)) for n in (16, 512, 2048, 8192)),
        context_ns=1e9 * costs.decode_context,
        decode_ms=tuple((n, 1e3 * (costs.step + n * costs.decode)) for n in (1, 256)),
        kv_tokens=KV_TOKENS,
        first_token_ms=2.0,
        second_token_ms=((0, read_ms),),
        kv_gb_per_s=1e6,
        under_load=costs,
    )


@contextmanager
def running(args: argparse.Namespace, model: Path, prefill: int, decode: int) -> Iterator[Fleet]:
    if args.model:
        flags = ["--max-num-seqs", "64"]
    else:
        token_bytes = make_long_model(model)
        flags = ["--engine", "simulated", "--sim-speed", str(1 / args.slower), "--dtype", "bfloat16"]
        flags += ["--kv-cache-memory", str(KV_TOKENS * token_bytes), "--max-batch-tokens", "8192"]
    with Fleet() as fleet:
        for start, count in ((fleet.start_prefill, prefill), (fleet.start_decode, decode)):
            for _ in range(count):
                start(model, [*flags, "--max-waiting", "4096", "--peer-timeout", "30"])
        fleet.start_router(model, ["--policy", args.policy])
        fleet.wait_ready()
        yield fleet


async def replay(url: str, workload: Workload, rate: float) -> list[Trace]:
    """Send the requests of a workload at their arrival times and return their traces."""
    endpoint = Endpoint.of(url)
    rng = random.Random(2)
    prompts = [random_prompt(rng, length, VOCABULARY) for length in workload.prompts]
    load = make_load(workload, rate, prompts)

    async def send(number: int, trace: Trace) -> None:
        request = load.requests[number]
        await complete(endpoint, completion_body(MODEL_NAME, request), request.num_tokens, trace, timeout=600)
        if trace.error:
            raise RuntimeError(trace.error)

    warmup = completion_body(MODEL_NAME, Request(0.0, random_prompt(rng, 64, VOCABULARY), 8))
    await complete(endpoint, warmup, 8, Trace(time.perf_counter()), timeout=600)  # lets nodes report their throughput
    return await open_loop(load.requests, send)


def compare(args: argparse.Namespace, model: Path, text: str) -> str:
    """Run a workload; return a table row with predicted / measured figures."""
    prompts, outputs, prefill, decode, rate_text = text.split(":")
    workload = workload_of(prompts, outputs, 0.0, args.requests)
    slower = 1.0 if args.model else args.slower
    rate = float(rate_text) / slower
    with running(args, model, int(prefill), int(decode)) as fleet:
        traces = asyncio.run(replay(fleet.url, workload, rate))
        local = sum(node.counter("local_prefills") for node in fleet.decode) / len(traces)
    costs = load_costs(args.costs) if args.costs else simulated_costs(model, slower)
    jobs = workload.jobs(rate)
    virtual_fleet(costs, Layout(int(prefill), int(decode)), LoadLimits()).run(jobs)
    ttft = [job.ttft for job in jobs]
    gaps = list(chain.from_iterable(job.gaps for job in jobs))
    measured_ttft = [trace.ttft for trace in traces]
    measured_gaps = list(chain.from_iterable(trace.gaps for trace in traces))
    cells = [cell(percentile(ttft, share), percentile(measured_ttft, share), slower) for share in SHARES]
    cells += [cell(percentile(gaps, share), percentile(measured_gaps, share), slower) for share in (50, 99)]
    return f"| {prompts} | {outputs} | {prefill}:{decode} | {rate_text} | {' | '.join(cells)} | {local:.0%} |"


def cell(predicted: float, measured: float, slower: float = 1.0) -> str:
    """Return both times in ms, for seconds of fleets that are ``slower``, and the error."""
    times = f"{1e3 * predicted / slower:.3g} / {1e3 * measured / slower:.3g}"
    return f"{times} ({predicted / measured - 1:+.0%})"


# ---------------------------------------------------------------- measured fleets


class Measured(NamedTuple):
    """Seconds of a fleet in docs/numbers.md."""

    ttft: tuple[float, float]  # p50, p99
    per_token: tuple[float, float]  # p50, p99
    longest_gap: float  # p99


def measured_fleets(text: str) -> dict[str, Measured]:
    """Return the fleets of a row of the table, by name."""

    def times(part: str) -> list[float]:
        return [float(number.replace(",", "")) / 1e3 for number in part.split("/")]

    fleets = {}
    for name, figures in zip(MEASURED_FLEETS, text.strip(" |").split("|")[2:], strict=True):
        ttft, per_token, longest_gap = map(times, figures.split(";")[:3])
        fleets[name] = Measured((ttft[0], ttft[1]), (per_token[0], per_token[1]), longest_gap[0])
    return fleets


def measured_rows(page: str) -> dict[str, dict[str, Measured]]:
    """Return the fleets of each row of the table "Under load", by the row's name."""
    table = page[page.index("## Under load") :].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if re.match(r"\| \d", line)]
    return {row.split("|")[1].strip(): measured_fleets(row) for row in rows}


def measured_loads() -> list[Load]:
    """Return the requests behind the table, in the order of its rows."""
    parser = argparse.ArgumentParser()
    add_load_flags(parser)
    return make_loads(parser.parse_args(MEASURED_LOADS.split()))


def compare_measured() -> None:
    costs = load_costs("h200-llama-8b")
    rows = measured_rows(NUMBERS.read_text())
    print(
        "| requests/s | fleet | TTFT p50, ms | p99 | time per token p50 | p99 | longest gap p99 |\n" + "|---" * 7 + "|"
    )
    for (name, fleets), load in zip(rows.items(), measured_loads(), strict=True):
        for fleet, measured in fleets.items():
            jobs = [Job(request.at, len(request.prompt), request.num_tokens) for request in load.requests]
            virtual_fleet(costs, MEASURED_FLEETS[fleet], LoadLimits()).run(jobs)
            decoded = [job for job in jobs if job.output > 1]
            cells = [
                cell(percentile([job.ttft for job in jobs], p), m) for p, m in zip((50, 99), measured.ttft, strict=True)
            ]
            per_token = [job.per_token for job in decoded]
            cells += [cell(percentile(per_token, p), m) for p, m in zip((50, 99), measured.per_token, strict=True)]
            cells.append(cell(percentile([job.longest_gap for job in decoded], 99), measured.longest_gap))
            print(f"| {name} | {fleet} | {' | '.join(cells)} |", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=WORKLOADS, help="PROMPT:OUTPUT:P:D:RATE")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--slower", type=float, default=6.0, help="factor on simulated costs, divisor of rates")
    parser.add_argument("--policy", default="prefix-aware")
    parser.add_argument("--model", type=Path, help="use real nodes with this checkpoint and one thread each")
    parser.add_argument("--costs", help="costs of the real nodes, written by bench/engine_steps.py --costs-out")
    parser.add_argument("--measured", action="store_true", help="compare with the table of docs/numbers.md")
    args = parser.parse_args(argv)
    if args.measured:
        compare_measured()
        return
    if bool(args.model) != bool(args.costs):
        parser.error("--model and --costs go together")
    print(
        "| prompts | outputs | P:D | requests/s | TTFT p50 | p90 | ITL p50 | p99 | prefilled on D |\n"
        + "|---" * 9
        + "|"
    )
    for text in args.workload:
        with tempfile.TemporaryDirectory() as directory:
            print(compare(args, args.model or Path(directory), text), flush=True)


if __name__ == "__main__":
    main()
