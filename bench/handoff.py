"""What a handoff costs: the same prompts with and without one, on a running decode node.

    pdserve prefill MODEL --port 9001 &
    pdserve decode MODEL --port 9002 --prefill 127.0.0.1:9001 &
    python bench/handoff.py --decode 127.0.0.1:9002 --prompts 256,1000,4000

Each prompt (random token ids) asks for a few tokens, in turn through the prefill node and on the decode node alone. The
time of the first token holds the prefill, those of the next ones the transfer, unless the prefill node goes ahead
meanwhile (``--decode-ahead``). Reported are medians, in ms from sending: ``ttft`` and ``second``, without and with a
handoff; ``later``, by how much each token comes later with one; and ``cost``, the most of these, also as a share of the
prefill.
"""

from __future__ import annotations

import argparse
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
            for turn in range(args.repeat + 1):
                for peer, times in taken.items():
                    prompt = source.choices(range(client.node.vocab_size), k=length)
                    start = time.perf_counter()
                    arrived = await client.token_times(prompt, args.tokens, peer)
                    if turn:  # the first of each warms up
                        times.append([moment - start for moment in arrived])
            print(json.dumps(summary(length, *taken.values())), flush=True)


def summary(length: int, without: list[list[float]], handed: list[list[float]]) -> dict[str, float | list[float]]:
    """Of prompts of a length: seconds to each token, by prompt."""
    alone, behind = (
        [1e3 * statistics.median(token) for token in zip(*runs, strict=True)] for runs in (without, handed)
    )
    later = [b - a for a, b in zip(alone, behind, strict=True)]
    return {
        "prompt_tokens": length,
        "ttft_ms": round(alone[0], 2),
        "ttft_handoff_ms": round(behind[0], 2),
        "second_ms": round(alone[1], 2),
        "second_handoff_ms": round(behind[1], 2),
        "later_ms": [round(each, 2) for each in later],
        "cost_ms": round(max(later), 2),
        "cost_share": round(max(later) / alone[0], 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", required=True, metavar="ADDR")
    parser.add_argument("--prompts", type=lambda text: [int(n) for n in text.split(",")], default=[256, 1000, 4000])
    parser.add_argument("--tokens", type=int, default=8, help="of each answer, at least two (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=9, help="counted prompts of each kind and length")
    parser.add_argument("--seed", type=int, default=0)
    return run_bench(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
