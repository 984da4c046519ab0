"""One client's streams beside clients that do not read theirs.

    python bench/slow_readers.py [--clients 20] [--repeat 5]        a minute

A router, a prefill node and a decode node with the embedded model: real processes and connections on this machine. Each
slow client requests n=8 choices of 2,000 tokens with 20 log-probabilities and reads nothing. The honest client streams
answers of 100 tokens, one after the other: first alone, then from the moment that the slow clients have sent their
requests. Prints its TTFT and the gaps between its chunks in ms, and the tokens that the nodes sampled for the slow
clients. Needs the test dependencies (pip install -e '.[dev]').
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fleet import MODEL_NAME, Fleet, start_fleet
from slow_clients import UNREAD, send_unread

from pdserve.config.hub import EMBEDDED_MODEL

_TOKENS = 100  # of an honest answer


@dataclass
class Figures:
    """Of the honest client, in ms."""

    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def row(self) -> Iterator[float]:
        yield from (statistics.median(self.ttfts), max(self.ttfts))
        gaps = sorted(self.gaps)
        yield from (statistics.median(gaps), gaps[int(0.99 * len(gaps))], gaps[-1])


def stream(client: httpx.Client, rng: random.Random, figures: Figures) -> None:
    """Stream one answer and record its times."""
    prompt = rng.choices(range(3, 4096), k=64)
    body: dict[str, Any] = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": _TOKENS, "ignore_eos": True}
    last, first = time.monotonic(), True
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        for _ in response.iter_raw():
            now = time.monotonic()
            (figures.ttfts if first else figures.gaps).append((now - last) * 1000)
            last, first = now, False


def measure(fleet: Fleet, clients: int, repeat: int) -> Figures:
    """Return the figures of the honest client beside ``clients`` slow ones."""
    figures, rng = Figures(), random.Random(0)
    with ExitStack() as stack, httpx.Client(base_url=fleet.url, timeout=600, trust_env=False) as honest:
        for _ in range(clients):
            stack.enter_context(send_unread(fleet.url, UNREAD))
        for _ in range(repeat):
            stream(honest, rng, figures)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args(argv)
    print("| slow clients | TTFT p50 | max | gap p50 | p99 | max | tokens for slow clients |")
    print("|---|---|---|---|---|---|---|")
    with start_fleet(EMBEDDED_MODEL) as fleet:
        measure(fleet, 0, 1)  # warm-up
        for clients in (0, args.clients):
            before = fleet.decode[0].counter("sampled_tokens")
            figures = measure(fleet, clients, args.repeat)
            sampled = fleet.decode[0].counter("sampled_tokens") - before - args.repeat * _TOKENS
            row = " | ".join(f"{value:.1f}" for value in figures.row())
            print(f"| {clients} | {row} | {max(0, sampled) if clients else 0:.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
