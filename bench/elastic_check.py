"""The simulation of bench/elastic_shift.py compared with running nodes: simulated engines, a real router, HTTP clients.

    PYTHONPATH=.:tests/support python bench/elastic_check.py --rates 8 16 --slower 4

Two nodes, elastic and as a prefill and a decode node; the same lognormal requests for both. Printed are simulated /
measured ms. All costs are ``--slower`` times as long, so that nodes, router and clients need few CPU cycles; printed
times are divided by it.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from fleet import Fleet, start_elastic
from plan_check import replay
from replay import make_long_model

from cli.numbers import percentile
from cli.plan.workload import Workload, workload_of
from cli.virtual_fleet.cards import Card
from cli.virtual_fleet.fleet import Simulation
from cli.virtual_fleet.jobs import Job
from pdserve.config.simulated_costs import KV_TOKENS, choose_costs

SHARES = (50, 90)
GAP_SHARES = (90, 99)


class Results(NamedTuple):
    """Seconds of each request, and the share of handoffs."""

    ttft: list[float]
    per_token: list[float]
    longest_gap: list[float]
    handoffs: float


def simulated(roles: Sequence[str], workload: Workload, rate: float, times: float) -> Results:
    at = accumulate(gap / rate for gap in workload.gaps)
    jobs = [Job(*values) for values in zip(at, workload.prompts, workload.outputs, strict=True)]
    costs = choose_costs([], 1.0 / times)
    simulation = Simulation(roles, card=Card(costs, 0.0, KV_TOKENS), device="simulated")
    simulation.run(jobs)
    decoded = [job for job in jobs if job.output > 1]
    per_token = [job.per_token for job in decoded]
    longest = [job.longest_gap for job in decoded]
    return Results([job.ttft for job in jobs], per_token, longest, simulation.handoffs / len(jobs))


def measured(roles: Sequence[str], workload: Workload, rate: float, times: float) -> Results:
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        flags = ["--engine", "simulated", "--sim-speed", str(1 / times), "--dtype", "bfloat16"]
        flags += ["--kv-cache-memory", str(KV_TOKENS * make_long_model(model)), "--max-batch-tokens", "8192"]
        flags += ["--max-waiting", "4096", "--peer-timeout", "30"]
        with running(roles, model, flags) as fleet:
            traces = asyncio.run(replay(fleet.url, workload, rate))
            handoffs = sum(node.counter("handoffs") for node in (*fleet.decode, *fleet.both))
    gaps = [trace.gaps for trace in traces if trace.gaps]
    return Results([trace.ttft for trace in traces], [*map(fmean, gaps)], [*map(max, gaps)], handoffs / len(traces))


def running(roles: Sequence[str], model: Path, flags: Sequence[str]) -> Fleet:
    policy = ["--policy", "prefix-aware"]
    if "both" in roles:
        return start_elastic(model, model / "nodes", len(roles), flags, policy)
    fleet = Fleet()
    fleet.start_prefill(model, flags)
    fleet.start_decode(model, flags)
    fleet.start_router(model, policy)
    fleet.wait_ready()
    return fleet


def cells(results: Results, times: float) -> list[str]:
    columns = (results.ttft, SHARES), (results.per_token, SHARES), (results.longest_gap, GAP_SHARES)
    return [f"{1e3 * percentile(values, share) / times:.3g}" for values, shares in columns for share in shares]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[8.0, 16.0], help="requests/s, before --slower")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--slower", type=float, default=4.0)
    args = parser.parse_args(argv)
    figures = "TTFT p50 | p90 | per token p50 | p90 | longest gap p90 | p99 | handoffs"
    print(f"| requests/s | fleet | {figures} |\n{'|---' * 9}|")
    workload = workload_of("mean=2000,p99=9350", "mean=200,p99=935", 0.0, args.requests)
    for rate in args.rates:
        for name, roles in (("1P1D", ["prefill", "decode"]), ("elastic", ["both", "both"])):
            results = [run(roles, workload, rate / args.slower, args.slower) for run in (simulated, measured)]
            rows = [cells(result, args.slower) for result in results]
            times = [" / ".join(pair) for pair in zip(*rows, strict=True)]
            handoffs = " / ".join(f"{result.handoffs:.0%}" for result in results)
            print(f"| {rate:g} | {name} | {' | '.join(times)} | {handoffs} |", flush=True)


if __name__ == "__main__":
    main()
