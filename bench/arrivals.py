"""Latency of requests that arrive at random, without a router: TTFT, time to the second token, and ITL.

    pdserve prefill MODEL --port 9001 &
    pdserve decode MODEL --port 9002 --prefill 127.0.0.1:9001 &
    python bench/arrivals.py --decode 127.0.0.1:9002 --rate 4 --prompt 2048

Requests arrive as a Poisson process for ``--seconds``; every prompt is handed off. Each figure is p50 / p99 in ms:
``ttft``, ``second`` (first token to second token) and ``itl`` (all later gaps). They show the effect of the prefill
node's ``--decode-ahead`` under load: a smaller ``second`` without a larger ``ttft``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from itertools import pairwise

import numpy as np
from decode_client import DecodeClient, connect, run_bench


async def request(client: DecodeClient, prompt: list[int], num_tokens: int) -> tuple[float, list[float]]:
    """Send a prompt; return the seconds to the first token and the gaps between tokens."""
    start = time.perf_counter()
    times = await client.token_times(prompt, num_tokens, client.prefill_node)
    return times[0] - start, [after - before for before, after in pairwise(times)]


async def run(args: argparse.Namespace) -> None:
    source = random.Random(f"{args.seed} {args.rate}")  # prompts of an earlier run would be cached
    async with connect(args.decode) as client:
        vocabulary = range(client.node.vocab_size)
        await request(client, source.choices(vocabulary, k=args.prompt), args.tokens)  # warms up
        running, end = [], time.perf_counter() + args.seconds
        while time.perf_counter() < end:
            prompt = source.choices(vocabulary, k=args.prompt)
            running.append(asyncio.create_task(request(client, prompt, args.tokens)))
            await asyncio.sleep(source.expovariate(args.rate))
        answers = await asyncio.gather(*running)
    figures = {
        "ttft_ms": [first for first, _ in answers],
        "second_ms": [gaps[0] for _, gaps in answers],
        "itl_ms": [gap for _, gaps in answers for gap in gaps[1:]],
    }
    result = {
        name: [round(1e3 * float(p), 1) for p in np.percentile(times, (50, 99))] for name, times in figures.items()
    }
    print(json.dumps({"requests": len(answers), "rate": args.rate, "prompt_tokens": args.prompt} | result))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", required=True, metavar="ADDR")
    parser.add_argument("--rate", type=float, default=4.0, help="requests/s")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, at least three")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    return run_bench(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
