"""TTFT of prompts whose beginning D has cached: P computes all, or pulls that part from D.

    pdserve prefill MODEL --port 9001 --kv-source 127.0.0.1:9002 &
    pdserve decode MODEL --port 9002 --prefill 127.0.0.1:9001 --handoff-min-tokens 0 &
    python bench/pull.py --decode 127.0.0.1:9002 --cached 4000,19000 [--streams 32]

Each prompt is a history of ``--cached`` random tokens, which D has computed before, and ``--new`` tokens, as a turn of
a conversation is. D hands it off to P, which has not seen it. ``computed_ms`` and ``pulled_ms`` are medians of TTFT.
``pulls`` counts prompts that D granted a lease for: P computes a prefix itself where it predicts that to be faster.

D decodes ``--streams`` sequences meanwhile; ``gaps`` has the p50, p99 and maximum of the ms between their
tokens: without prompts (``quiet``), beside prompts that P computes, and beside prompts that P pulls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np
from decode_client import DecodeClient, connect, run_bench
from steady_decode import SETTLE, STREAM_PROMPT, gaps_between

QUIET = 3.0  # seconds without prompts


class Bench:
    def __init__(self, client: DecodeClient, args: argparse.Namespace) -> None:
        self._client = client
        self._args = args
        self._random = random.Random(args.seed)

    async def measure(self, cached: int, *, pull: bool) -> tuple[list[float], list[float]]:
        """Return the seconds to the first token of each prompt, and the gaps of the streams meanwhile."""
        histories = [self._tokens(cached) for _ in range(self._args.repeat)]
        for history in histories:
            await self._client.token_times(history, 1)
        taken: list[float] = []

        async def send() -> None:
            for history in histories:
                await asyncio.sleep(self._args.pause)
                prompt = [*history, *self._tokens(self._args.new)]
                taken.append(await self._first_token(prompt, cached if pull else 0))

        gaps = await self.beside(send())
        return taken, gaps

    async def beside(self, work: Coroutine[Any, Any, None]) -> list[float]:
        """Return the gaps between tokens of the streams while ``work`` is done."""
        times: list[list[float]] = [[] for _ in range(self._args.streams)]
        streams = [asyncio.create_task(self._stream(stream_times)) for stream_times in times]
        await asyncio.sleep(SETTLE if streams else 0.0)
        start = time.perf_counter()
        await work
        end = time.perf_counter()
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        return [gap for stream_times in times for gap in gaps_between(stream_times, start, end)]

    async def _first_token(self, prompt: list[int], prefix_tokens: int) -> float:
        start = time.perf_counter()
        arrived = await self._client.token_times(
            prompt, self._args.tokens, self._client.prefill_node, prefix_tokens=prefix_tokens
        )
        return arrived[0] - start

    async def _stream(self, times: list[float]) -> None:
        await self._client.token_times(self._tokens(STREAM_PROMPT), self._args.stream_tokens, times=times)

    def _tokens(self, length: int) -> list[int]:
        return self._random.choices(range(self._client.node.vocab_size), k=length)


async def run(args: argparse.Namespace) -> None:
    async with connect(args.decode) as client:
        bench = Bench(client, args)
        await bench.measure(args.cached[0], pull=False)  # kernels, and the nodes' own measurements
        await bench.measure(args.cached[0], pull=True)
        if args.streams:
            quiet = percentiles(await bench.beside(asyncio.sleep(QUIET)))
            print(json.dumps({"streams": args.streams, "gaps": {"quiet": quiet}}), flush=True)
        for cached in args.cached:
            computed, beside_computed = await bench.measure(cached, pull=False)
            before = await client.counter("pdserve_leases_granted_total")
            pulled, beside_pulled = await bench.measure(cached, pull=True)
            pulls = int(await client.counter("pdserve_leases_granted_total") - before)
            without = statistics.median(computed)
            with_pull = statistics.median(pulled)
            figures: dict[str, object] = {
                "cached": cached,
                "new": args.new,
                "computed_ms": round(1e3 * without, 2),
                "pulled_ms": round(1e3 * with_pull, 2),
                "ratio": round(with_pull / without, 4),
                "pulls": f"{pulls} of {len(pulled)}",
            }
            if args.streams:
                figures["gaps"] = {"computed": percentiles(beside_computed), "pulled": percentiles(beside_pulled)}
            print(json.dumps(figures), flush=True)


def percentiles(gaps: list[float]) -> list[float]:
    """Return p50, p99 and the maximum of gaps in seconds, in ms."""
    return [round(1e3 * gap, 2) for gap in np.percentile(np.array(gaps), [50, 99, 100])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", required=True, metavar="ADDR")
    parser.add_argument(
        "--cached", default=[4000, 19000], type=lambda text: [int(length) for length in text.split(",")]
    )
    parser.add_argument("--new", type=int, default=1000, help="tokens behind the cached ones (default 1000)")
    parser.add_argument("--tokens", type=int, default=4, help="output tokens")
    parser.add_argument("--repeat", type=int, default=7, help="prompts of each kind and length")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds before each prompt")
    parser.add_argument("--streams", type=int, default=0, help="sequences that D decodes meanwhile (default none)")
    parser.add_argument("--stream-tokens", type=int, default=5000, help="of each; must last for all prompts")
    parser.add_argument("--seed", type=int, default=0)
    return run_bench(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
