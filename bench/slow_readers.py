"""One client's streams beside clients that do not read theirs.

    python bench/slow_readers.py [--clients 20] [--repeat 10]        a minute

A router, a prefill node and a decode node with the embedded model, or simulated ones (an 8B model on an H200) with
``--simulated``: real processes and connections on this machine. The slow clients share an address and so count as one.
Each requests n=8 choices of 2,000 tokens with 20 log-probabilities and reads nothing. The honest client streams
answers of 100 tokens, one after the other: alone; from the moment that the slow clients have sent their requests until
none of them is computed any more (at most ``--repeat`` answers); and after that. Prints its TTFT and the gaps between
its chunks in ms, and the tokens that were sampled for the slow clients. Needs the test dependencies
(pip install -e '.[dev]').
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

from pdserve.checkpoint.hub import EMBEDDED_MODEL

_TOKENS = 100  # of an honest answer


@dataclass
class Figures:
    """Times of the honest client, in ms."""

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


class Bench:
    """The honest client of a fleet."""

    def __init__(self, fleet: Fleet, client: httpx.Client) -> None:
        self._decode = fleet.decode[0]
        self._client = client
        self._rng = random.Random(0)

    def measure(self, name: str, repeat: int, *, while_others_run: bool = False) -> None:
        """Stream ``repeat`` answers, fewer if no other request runs any more, and print a row."""
        figures, sampled = Figures(), self._decode.counter("sampled_tokens")
        for _ in range(repeat):
            stream(self._client, self._rng, figures)
            if while_others_run and not self._decode.status().running:
                break
        sampled = self._decode.counter("sampled_tokens") - sampled
        others = max(0, sampled - len(figures.ttfts) * _TOKENS)  # P samples the first token of some answers
        row = " | ".join(f"{value:.1f}" for value in figures.row())
        print(f"| {name} | {len(figures.ttfts)} | {row} | {others:.0f} |", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--simulated", action="store_true")
    args = parser.parse_args(argv)
    flags = ["--engine", "simulated"] if args.simulated else []
    with ExitStack() as stack:
        fleet = stack.enter_context(start_fleet(EMBEDDED_MODEL, prefill_flags=flags, decode_flags=flags))
        transport = httpx.HTTPTransport(local_address="127.0.0.2")  # the slow clients have 127.0.0.1
        client = stack.enter_context(
            httpx.Client(base_url=fleet.url, transport=transport, timeout=600, trust_env=False)
        )
        bench = Bench(fleet, client)
        stream(client, random.Random(1), Figures())  # warm-up
        print("| slow clients | answers | TTFT p50 | max | gap p50 | p99 | max | tokens for slow clients |")
        print("|---|---|---|---|---|---|---|---|")
        bench.measure("none", args.repeat)
        for _ in range(args.clients):
            stack.enter_context(send_unread(fleet.url, UNREAD))
        bench.measure(f"{args.clients} begin", args.repeat, while_others_run=True)
        bench.measure(f"{args.clients} stalled", args.repeat)
    return 0


if __name__ == "__main__":
    sys.exit(main())
