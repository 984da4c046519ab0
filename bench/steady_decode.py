"""ITL of running streams while other clients send prompts: without prompts, with prompts prefilled on the same node,
and with prompts prefilled on P.

    pdserve prefill MODEL --port 9001 &
    pdserve decode MODEL --port 9002 --prefill 127.0.0.1:9001 &
    python bench/steady_decode.py --decode 127.0.0.1:9002

``--streams`` requests with 128 prompt tokens decode all the time. Beside them, ``--clients`` closed-loop clients send
prompts of ``--prompt`` random tokens that generate two tokens each. Figures are in ms, measured at the client over the
gaps of all streams while prompts were sent (reference load: 32 streams, two clients, 8,192 tokens).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from decode_client import DecodeClient, connect, run_bench

STREAM_PROMPT = 128  # tokens
SETTLE = 1.0  # seconds for all streams to decode


class Load:
    """Runs the streams and the clients, and measures the gaps between tokens."""

    def __init__(self, client: DecodeClient, args: argparse.Namespace) -> None:
        self._client = client
        self._args = args
        self._random = random.Random(args.seed)

    async def measure(self, clients: int, prefill_node: str) -> dict[str, float]:
        """Run once; return percentiles of the gaps in ms, and the number of prompts served meanwhile."""
        streams = [asyncio.create_task(self._stream()) for _ in range(self._args.streams)]
        await asyncio.sleep(SETTLE)
        start = time.perf_counter()
        end = start + self._args.seconds
        served = await asyncio.gather(*(self._send_prompts(end, prefill_node) for _ in range(clients)))
        await asyncio.sleep(max(0.0, end - time.perf_counter()))
        gaps = [gap for times in await asyncio.gather(*streams) for gap in gaps_between(times, start, end)]
        p50, p99, largest = np.percentile(np.array(gaps) * 1e3, [50, 99, 100])
        return {
            "p50_ms": round(p50, 2),
            "p99_ms": round(p99, 2),
            "max_ms": round(largest, 2),
            "gaps": len(gaps),
            "prompts": sum(served),
        }

    async def _stream(self) -> list[float]:
        return await self._client.token_times(self._prompt(STREAM_PROMPT), self._args.tokens)

    async def _send_prompts(self, end: float, prefill_node: str) -> int:
        served = 0
        while time.perf_counter() < end:
            await self._client.token_times(self._prompt(self._args.prompt), 2, prefill_node)
            served += 1
        return served

    def _prompt(self, length: int) -> list[int]:
        return self._random.choices(range(self._client.node.vocab_size), k=length)


def gaps_between(times: list[float], start: float, end: float) -> Iterator[float]:
    """Return the gaps between tokens that arrived from ``start`` to ``end``. Raises RuntimeError if they end early."""
    if times[-1] < end:
        raise RuntimeError("a stream ended before --seconds had passed; raise --tokens")
    inside = [at for at in times if start <= at <= end]
    return (later - earlier for earlier, later in pairwise(inside))


async def run(args: argparse.Namespace) -> None:
    async with connect(args.decode) as client:
        load = Load(client, args)
        for name, clients, peer in (
            ("no prompts", 0, ""),
            ("prompts on the same node", args.clients, ""),
            ("prompts on P", args.clients, client.prefill_node),
        ):
            figures = await load.measure(clients, peer)
            print(json.dumps({"streams": args.streams, "with": name} | figures), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", required=True, metavar="ADDR")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2000, help="tokens per stream; must last for --seconds + 1 s")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens per prompt of the clients")
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds during which prompts are sent")
    parser.add_argument("--seed", type=int, default=0)
    return run_bench(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
