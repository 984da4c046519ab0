"""Elastic fleets beside fixed splits, simulated (cli/virtual_fleet/) with the router's real policy.

    PYTHONPATH=.:tests/support python bench/elastic_shift.py --nodes 2 8

A burst of long prompts with short outputs, then one of short prompts with long outputs, on the same fleet, compared
with every split into prefill and decode nodes. 64 nodes take an hour of CPU time; ``--seconds 4`` is a fifth of that.
bench/simulated_goodput.py has constant loads.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from fleet_loads import BURSTS, Figures, Shift, shift

from cli.virtual_fleet.fleet import split


def splits(nodes: int, seconds: float) -> dict[int, Shift]:
    """Simulate splits by number of prefill nodes; with many nodes, only splits near the best of each burst."""
    step = max(1, nodes // 8)
    shifts = {prefill: shift(split(prefill, nodes), seconds) for prefill in range(0, nodes, step)}
    while step > 1:
        step //= 2
        for phase in range(len(BURSTS)):
            best = best_split(shifts, phase)
            for prefill in (best - step, best + step):
                if 0 <= prefill < nodes and prefill not in shifts:
                    shifts[prefill] = shift(split(prefill, nodes), seconds)
    return shifts


def best_split(shifts: dict[int, Shift], phase: int) -> int:
    """Return the number of prefill nodes with the shortest mean duration of requests."""
    return min(shifts, key=lambda prefill: shifts[prefill].phases[phase].duration)


def print_shift(nodes: int, seconds: float) -> None:
    shifts = splits(nodes, seconds)
    elastic = shift(["both"] * nodes, seconds)
    for phase, burst in enumerate(BURSTS):
        best = best_split(shifts, phase)
        other = best_split(shifts, 1 - phase)
        named = [
            ("elastic", elastic),
            (f"{best}P{nodes - best}D", shifts[best]),
            (f"{other}P{nodes - other}D", shifts[other]),
        ]
        base = shifts[best].phases[phase]
        for name, result in named:
            figures = result.phases[phase]
            worse = f"{figures.duration / base.duration - 1:+.0%} | {figures.requests / base.requests - 1:+.0%}"
            print(f"| {nodes} | {burst.name} | {name} | {' | '.join(cells(figures))} | {worse} |", flush=True)
    leaning = " ".join(str(sum(share > 0.5 for share in shares)) for shares in elastic.simulation.shares[::2])
    moves = elastic.simulation.moves
    handoffs = elastic.simulation.handoffs
    print(f"\nelastic, {nodes} nodes: {moves} moves, {handoffs} handoffs")
    print(f"nodes that mostly prefill, every 2 s: {leaning}\n")


def cells(figures: Figures) -> Iterator[str]:
    yield f"{figures.requests:.1f}"
    yield f"{figures.tokens:,.0f}"
    for values in (figures.ttft, figures.per_token, figures.longest_gap):
        yield " / ".join(f"{1e3 * value:.3g}" if value < 0.1 else f"{1e3 * value:.0f}" for value in values.values())
    yield f"{figures.duration:.2f}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each burst")
    args = parser.parse_args(argv)
    figures = "requests/s | tokens/s | TTFT p50 / p90 / p99, ms | per token, ms | longest gap, ms | mean duration, s"
    print(f"| nodes | burst | fleet | {figures} | duration | requests/s |\n{'|---' * 11}|")
    for nodes in args.nodes:
        print_shift(nodes, args.seconds)


if __name__ == "__main__":
    main()
