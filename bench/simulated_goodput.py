"""The loads of bench/goodput_fleets.py on simulated fleets: the real scheduler, policy and moves, modelled cards.

    PYTHONPATH=.:tests/support python bench/simulated_goodput.py --rates 8,16,24,32 --seed 5 \
        --also 20:mean=512,sigma=0.8:mean=512,sigma=0.8
    PYTHONPATH=.:tests/support python bench/simulated_goodput.py --card h200 --rates 16,24 --seconds 15 --repeat 4

The flags of loads are those of bench/goodput_fleets.py, and so are the requests. A fleet is ``1p1d``, ``2d``, another
pair of numbers, ``elastic`` (as many nodes as the first fleet), or ``turn``: nodes that requests use one after the
other. ``--repeat`` takes further seeds; figures are means over them. ``--by-rate`` takes the requests of a client that
draws lognormal lengths (means of 2,000 and 200 tokens, sigma 0.8) from a seed of 100 · rate + 7.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import fmean
from typing import NamedTuple

from loads import add_load_flags, make_loads

from cli.bench.http_load import percentiles
from cli.plan.costs import load_costs
from cli.virtual_fleet.cards import H100, Card, Delays
from cli.virtual_fleet.fleet import Simulation, no_moves, split
from cli.virtual_fleet.jobs import Job
from pdserve.request_cost import ITL_OBJECTIVE, TTFT_OBJECTIVE
from router.fleet.moves import moves
from router.fleet.policy import prefix_aware, round_robin

SHARES = ("p50", "p90", "p99")
CARDS = {"h100": H100, "h200": load_costs("h200-llama-8b").card()}


class Results(NamedTuple):
    """Figures of one run. Times are in ms; ``good`` and ``handoffs`` are percentages."""

    ttft: dict[str, float]
    per_token: dict[str, float]
    second: dict[str, float]  # from the first to the second token
    longest_gap: dict[str, float]
    tokens: float  # per second
    good: float
    handoffs: float
    moves: float


def roles_of(fleet: str, nodes: int) -> list[str]:
    if match := re.fullmatch(r"(?:(\d+)p)?(\d+)d", fleet):
        prefill = int(match[1] or 0)
        return split(prefill, prefill + int(match[2]))
    return ["both"] * nodes


def run(fleet: str, nodes: int, jobs: list[Job], card: Card, delays: Delays, ttft_target: float) -> Results:
    in_turn = fleet == "turn"
    roles = ["decode"] * nodes if in_turn else roles_of(fleet, nodes)
    policy = round_robin if in_turn else prefix_aware
    find_moves = no_moves if in_turn else moves
    simulation = Simulation(roles, policy, find_moves, card=card, delays=delays, ttft_target=ttft_target)
    simulation.run(jobs)
    decoded = [job for job in jobs if job.output > 1]
    good = sum(job.ttft <= TTFT_OBJECTIVE and job.per_token <= ITL_OBJECTIVE for job in jobs)
    return Results(
        percentiles(job.ttft for job in jobs),
        percentiles(job.per_token for job in decoded),
        percentiles(job.second_gap for job in decoded),
        percentiles(job.longest_gap for job in decoded),
        sum(job.output for job in jobs) / max(job.end for job in jobs),
        100 * good / len(jobs),
        100 * simulation.handoffs / len(jobs),
        simulation.moves,
    )


def loads_of(args: argparse.Namespace) -> dict[str, list[list[Job]]]:
    """Return the jobs of each repetition by the name of the load."""
    jobs_by_load: dict[str, list[list[Job]]] = {}
    for seed in range(args.seed, args.seed + args.repeat):
        args.seed = seed
        for load in make_loads(args) if not args.by_rate else []:
            jobs = [Job(request.at, len(request.prompt), request.num_tokens) for request in load.requests]
            jobs_by_load.setdefault(load.name, []).append(jobs)
    for rate in args.rates if args.by_rate else []:
        jobs_by_load[f"{rate:g}"] = [jobs_by_rate(rate, args.seconds)]
    return jobs_by_load


def jobs_by_rate(rate: float, seconds: float) -> list[Job]:
    rng = random.Random(int(rate * 100) + 7)
    at = 0.0
    jobs = list[Job]()

    def length(mean: float) -> int:
        return max(16, int(rng.lognormvariate(math.log(mean) - 0.32, 0.8)))

    while at < seconds:
        at += rng.expovariate(rate)
        prompt = min(length(2000), 12_000)
        output = min(length(200), 1_000)
        for _ in range(prompt):  # token ids
            rng.randrange(300, 100_000)
        jobs.append(Job(at, prompt, output))
    return jobs


def row(name: str, fleet: str, results: Sequence[Results]) -> str:
    cells = [
        " / ".join(f"{fmean(getattr(result, field)[share] for result in results):.3g}" for share in SHARES)
        for field in ("ttft", "per_token", "second", "longest_gap")
    ]
    rest = f"{fmean(result.tokens for result in results):,.0f}", f"{fmean(result.good for result in results):.0f} %"
    last = f"{fmean(result.handoffs for result in results):.0f} %", f"{fmean(result.moves for result in results):.0f}"
    return f"| {name} | {fleet} | {' | '.join((*cells, *rest, *last))} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleets", nargs="+", default=["2d", "1p1d", "elastic"], metavar="FLEET")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="seeds, from --seed on")
    parser.add_argument("--by-rate", action="store_true", help="requests of the separate client")
    parser.add_argument("--card", choices=CARDS, default="h100", help="costs of steps")
    for name, what in (("message", "from node to node"), ("confirm", "of D's processes in a handoff")):
        default = 1e3 * getattr(Delays, name)
        parser.add_argument(f"--{name}-ms", type=float, default=default, metavar="MS", help=what)
    parser.add_argument(
        "--ttft-target", type=float, default=1e3 * TTFT_OBJECTIVE, metavar="MS", help="of nodes (default %(default)g)"
    )
    add_load_flags(parser)
    args = parser.parse_args(argv)
    delays = Delays(message=args.message_ms / 1e3, confirm=args.confirm_ms / 1e3)
    nodes = len(roles_of(args.fleets[0], 2))
    columns = "TTFT, ms | per token | first to second | longest gap | tokens/s | good | handoffs | moves"
    print(f"| requests/s | fleet | {columns} |")
    print("|---" * 10 + "|")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = [
            (
                name,
                fleet,
                [
                    pool.submit(run, fleet, nodes, jobs, CARDS[args.card], delays, args.ttft_target / 1e3)
                    for jobs in repeated
                ],
            )
            for name, repeated in loads_of(args).items()
            for fleet in args.fleets
        ]
        for name, fleet, futures in rows:
            print(row(name, fleet, [future.result() for future in futures]), flush=True)


if __name__ == "__main__":
    main()
