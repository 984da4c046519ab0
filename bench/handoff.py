"""Cost of a handoff: token times of equal prompts with and without a handoff, on a running decode node.

    pdserve prefill MODEL --port 9001 &
    pdserve decode MODEL --port 9002 --prefill 127.0.0.1:9001 &
    python bench/handoff.py --decode 127.0.0.1:9002 --prompts 256,1000,4000

Prompts (random token ids) alternate between a handoff and a prefill on the decode node; each generates a few tokens.
Each comes after a pause, so that both nodes were idle: the host of a node that was idle is slower for some steps.
The first token's time includes the prefill. The next tokens' times include the transfer, unless the prefill node
decodes ahead meanwhile (``--decode-ahead``). All figures are medians in ms from sending: ``ttft`` and ``second``,
without and with a handoff; ``later``, the delay of each token by the handoff; ``cost``, the largest delay, also as a
share of the prefill.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time

from decode_client import connect, run_bench


async def run(args: argparse.Namespace) -> None:
    source = random.Random(args.seed)
    async with connect(args.decode) as client:
        for length in args.prompts:
            taken: dict[str, list[list[float]]] = {"": [], client.prefill_node: []}
            for repetition in range(args.repeat + 1):
                for peer, times in taken.items():
                    prompt = source.choices(range(client.node.vocab_size), k=length)
                    await asyncio.sleep(args.pause)
                    start = time.perf_counter()
                    arrived = await client.token_times(prompt, args.tokens, peer)
                    if repetition:  # the first one is a warm-up
                        times.append([moment - start for moment in arrived])
            print(json.dumps(summary(length, *taken.values())), flush=True)


def summary(length: int, local: list[list[float]], handed_off: list[list[float]]) -> dict[str, float | list[float]]:
    """Summarize the prompts of one length; both lists have the seconds to each token, by prompt."""
    without, with_handoff = (
        [1e3 * statistics.median(token) for token in zip(*runs, strict=True)] for runs in (local, handed_off)
    )
    later = [b - a for a, b in zip(without, with_handoff, strict=True)]
    return {
        "prompt_tokens": length,
        "ttft_ms": round(without[0], 2),
        "ttft_handoff_ms": round(with_handoff[0], 2),
        "second_ms": round(without[1], 2),
        "second_handoff_ms": round(with_handoff[1], 2),
        "later_ms": [round(seconds, 2) for seconds in later],
        "cost_ms": round(max(later), 2),
        "cost_share": round(max(later) / without[0], 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", required=True, metavar="ADDR")
    parser.add_argument("--prompts", type=lambda text: [int(n) for n in text.split(",")], default=[256, 1000, 4000])
    parser.add_argument("--tokens", type=int, default=8, help="output tokens, at least two (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=9, help="measured prompts per kind and length")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds before each prompt (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return run_bench(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
