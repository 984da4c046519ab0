"""ITL of running streams while other clients send prompts: without prompts, with prompts prefilled on the same node,
and with prompts prefilled on P. And how much longer prompts take on a node whose streams decode than alone.

    pdserve prefill MODEL --port 9001 &
    pdserve decode MODEL --port 9002 --prefill 127.0.0.1:9001 [--itl-target MS] &
    python bench/steady_decode.py --decode 127.0.0.1:9002

``--streams`` requests with 128 prompt tokens decode all the time. Beside them, ``--clients`` closed-loop clients send
prompts of ``--prompt`` random tokens. ``p50_ms``, ``p99_ms`` and ``max_ms`` are measured at the client over the gaps of
all streams while prompts were sent (reference load: 32 streams, two clients, 8,192 tokens). ``prompt_ms`` is the median
from a prompt to its first token. ``prompt_ratio`` divides it by the clients' median without streams.

A decode node without ``--prefill`` has no last row.
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
        """Run once; return percentiles of the gaps in ms, and the number and times of the prompts meanwhile."""
        times: list[list[float]] = [[] for _ in range(self._args.streams)]
        streams = [asyncio.create_task(self._stream(stream_times)) for stream_times in times]
        await asyncio.sleep(SETTLE)
        start = time.perf_counter()
        end = start + self._args.seconds
        prompts = await self._all_prompts(clients, end, prefill_node)
        await asyncio.sleep(max(0.0, end - time.perf_counter()))
        for stream in streams:
            stream.cancel()
        ended = await asyncio.gather(*streams, return_exceptions=True)
        if not all(isinstance(ending, asyncio.CancelledError) for ending in ended):
            raise RuntimeError(f"a stream ended before --seconds had passed; raise --tokens ({ended[0]})")
        gaps = [gap for stream_times in times for gap in gaps_between(stream_times, start, end)]
        p50, p99, largest = np.percentile(np.array(gaps) * 1e3, [50, 99, 100])
        figures = {"p50_ms": round(p50, 2), "p99_ms": round(p99, 2), "max_ms": round(largest, 2), "gaps": len(gaps)}
        return figures | ({"prompts": len(prompts), "prompt_ms": median_ms(prompts)} if prompts else {})

    async def prompts_alone(self) -> float:
        """Return the median ms of prompts without streams."""
        return median_ms(await self._all_prompts(self._args.clients, time.perf_counter() + self._args.seconds, ""))

    async def _all_prompts(self, clients: int, end: float, prefill_node: str) -> list[float]:
        """Send prompts until ``end``; return the seconds to each first token."""
        times_of_clients = await asyncio.gather(*(self._send_prompts(end, prefill_node) for _ in range(clients)))
        return [seconds for client_times in times_of_clients for seconds in client_times]

    async def _stream(self, times: list[float]) -> None:
        await self._client.token_times(self._prompt(STREAM_PROMPT), self._args.tokens, times=times)

    async def _send_prompts(self, end: float, prefill_node: str) -> list[float]:
        times: list[float] = []
        num_tokens = 2 if prefill_node else 1  # D computes the second token on the KV that it has read
        while (start := time.perf_counter()) < end:
            tokens = await self._client.token_times(self._prompt(self._args.prompt), num_tokens, prefill_node)
            times.append(tokens[0] - start)
        return times

    def _prompt(self, length: int) -> list[int]:
        return self._random.choices(range(self._client.node.vocab_size), k=length)


def gaps_between(times: list[float], start: float, end: float) -> Iterator[float]:
    """Return the gaps between tokens that arrived from ``start`` to ``end``."""
    inside = [at for at in times if start <= at <= end]
    return (later - earlier for earlier, later in pairwise(inside))


def median_ms(seconds: list[float]) -> float:
    return round(float(np.median(seconds)) * 1e3, 1)


async def run(args: argparse.Namespace) -> None:
    async with connect(args.decode) as client:
        load = Load(client, args)
        await load.prompts_alone()  # until the node has measured its steps
        alone = await load.prompts_alone()
        report("prompts alone", {"prompt_ms": alone})
        report(f"{args.streams} streams, no prompts", await load.measure(0, ""))
        beside = await load.measure(args.clients, "")
        target = await client.counter("pdserve_itl_target_seconds")
        ratio = round(beside["prompt_ms"] / alone, 2)
        figures = beside | {"prompt_ratio": ratio, "itl_target_ms": round(target * 1e3, 2)}
        report(f"{args.streams} streams, prompts on the same node", figures)
        if client.node.connected_peers:
            figures = await load.measure(args.clients, client.prefill_node)
            report(f"{args.streams} streams, prompts on P", figures)


def report(what: str, figures: dict[str, float]) -> None:
    print(json.dumps({"load": what} | figures), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", required=True, metavar="ADDR")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=5000, help="tokens per stream; must last for --seconds + 1 s")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens per prompt of the clients")
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds during which prompts are sent")
    parser.add_argument("--seed", type=int, default=0)
    return run_bench(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
