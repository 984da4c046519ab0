"""What a handoff costs: the same prompts with and without one, on a running decode node.

    pdserve prefill MODEL --port 9001 &
    pdserve decode MODEL --port 9002 --prefill 127.0.0.1:9001 &
    python bench/handoff.py --decode 127.0.0.1:9002 --prompts 256,1000,4000

Each prompt (random token ids) asks for two tokens, in turn through the prefill node and on the decode node alone. The
time of the first token then holds the prefill, that of the second the transfer as well. Reported are medians, in ms:
``ttft``, ``second`` (time from sending to the second token) and ``cost`` (the differences in ``second``), the last also
as a share of the prefill.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time

from decode_client import connect, run_bench


async def run(args: argparse.Namespace) -> list[dict[str, float]]:
    source = random.Random(args.seed)
    rows = []
    async with connect(args.decode) as client:
        for length in args.prompts:
            taken: dict[str, list[tuple[float, float]]] = {"": [], client.prefill_node: []}
            for turn in range(args.repeat + 1):
                for peer, times in taken.items():
                    prompt = source.choices(range(client.node.vocab_size), k=length)
                    start = time.perf_counter()
                    first, second = await client.token_times(prompt, 2, peer)
                    if turn:  # the first of each warms up
                        times.append((first - start, second - start))
            rows.append(summary(length, *taken.values()))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def summary(length: int, without: list[tuple[float, float]], handed: list[tuple[float, float]]) -> dict[str, float]:
    def median_ms(pairs: list[tuple[float, float]], which: int) -> float:
        return statistics.median(pair[which] for pair in pairs) * 1e3

    prefill, second, second_handed = median_ms(without, 0), median_ms(without, 1), median_ms(handed, 1)
    return {
        "prompt_tokens": length,
        "ttft_ms": round(prefill, 2),
        "ttft_handoff_ms": round(median_ms(handed, 0), 2),
        "second_ms": round(second, 2),
        "second_handoff_ms": round(second_handed, 2),
        "cost_ms": round(second_handed - second, 2),
        "cost_share": round((second_handed - second) / prefill, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", required=True, metavar="ADDR")
    parser.add_argument("--prompts", type=lambda text: [int(n) for n in text.split(",")], default=[256, 1000, 4000])
    parser.add_argument("--repeat", type=int, default=9, help="counted prompts of each kind and length")
    parser.add_argument("--seed", type=int, default=0)
    return run_bench(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
