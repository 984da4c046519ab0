"""Latency of requests that arrive at random, without a router: TTFT, time to the second token, and ITL.

    pdserve prefill MODEL --port 9001 &
    pdserve decode MODEL --port 9002 --prefill 127.0.0.1:9001 &
    python bench/arrivals.py --decode 127.0.0.1:9002 --rate 4 --prompt 2048

Requests arrive as a Poisson process for ``--seconds``; every prompt is handed off. Figures are percentiles in ms:
``ttft``, ``second`` (first token to second token) and ``itl`` (all later gaps). They show the effect of the prefill
node's ``--decode-ahead`` under load: a smaller ``second`` without a larger ``ttft``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

from decode_client import connect, run_bench
from loads import make_load, open_loop

from cli.bench.http_load import Trace, percentiles
from cli.bench.requests import random_prompt
from cli.plan.workload import workload_of


async def run(args: argparse.Namespace) -> None:
    source = random.Random(f"{args.seed} {args.rate}")  # prompts of an earlier run would be cached
    workload = workload_of(
        str(args.prompt), str(args.tokens), 0.0, round(args.rate * args.seconds), source.getrandbits(60)
    )
    async with connect(args.decode) as client:

        async def send(number: int, trace: Trace) -> None:
            trace.start = time.perf_counter()
            trace.tokens = await client.token_times(prompts[number], args.tokens, client.prefill_node)

        vocabulary = client.node.vocab_size
        prompts = [random_prompt(source, args.prompt, vocabulary) for _ in workload.prompts]
        warmup = random_prompt(source, args.prompt, vocabulary)
        await client.token_times(warmup, args.tokens, client.prefill_node)
        traces = await open_loop(make_load(workload, args.rate, prompts).requests, send)
    figures = {
        "ttft_ms": [trace.ttft for trace in traces],
        "second_ms": [trace.gaps[0] for trace in traces],
        "itl_ms": [gap for trace in traces for gap in trace.gaps[1:]],
    }
    result = {name: percentiles(seconds) for name, seconds in figures.items()}
    print(json.dumps({"requests": len(traces), "rate": args.rate, "prompt_tokens": args.prompt} | result))


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
