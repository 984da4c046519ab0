"""Latency of a client's short requests, alone and while another client keeps many long ones waiting.

    PYTHONPATH=.:tests python bench/fair_clients.py [--requests 200] [--seconds 30]

A prefill node, a decode node (simulated: an 8B model on an H200) with 32 slots, and a router. The busy client
(127.0.0.1) sends prompts of 2,000 tokens with 200 output tokens and replaces each that ends; with ``--choices 128``,
few requests of many choices, on 256 slots. The quiet client (127.0.0.2) sends prompts of 100 tokens with 20 output
tokens, one after the other. The figures are its TTFT and the gaps between its tokens: p50 / p99 / longest, in ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator

import httpx
import numpy as np
from fleet import Fleet, start_fleet

from pdserve.checkpoint.hub import EMBEDDED_MODEL

NODE = ["--engine", "simulated"]
_seeds = itertools.count()


def connect(fleet: Fleet, address: str) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(local_address=address, limits=httpx.Limits(max_connections=None))
    return httpx.AsyncClient(base_url=fleet.url, transport=transport, timeout=600)


def body(prompt_tokens: int, max_tokens: int, n: int = 1) -> dict[str, object]:
    seed = next(_seeds)
    prompt = [10 + (seed + index) % 4000 for index in range(prompt_tokens)]
    fields = {"prompt": prompt, "max_tokens": max_tokens, "n": n, "ignore_eos": True, "cache_salt": str(seed)}
    return {"model": "test-model", **fields}


@contextlib.asynccontextmanager
async def busy(fleet: Fleet, requests: int, choices: int) -> AsyncIterator[None]:
    """Keep ``requests`` long requests at the router."""
    async with connect(fleet, "127.0.0.1") as http:

        async def send() -> None:
            while True:
                (await http.post("/v1/completions", json=body(2000, 200, choices))).raise_for_status()

        tasks = [asyncio.create_task(send()) for _ in range(requests)]
        await asyncio.sleep(5.0)  # slots and queues are full
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def quiet(fleet: Fleet, seconds: float) -> str:
    """Send short requests, at least one; return the figures."""
    ttfts: list[float] = []
    gaps: list[float] = []
    end = time.perf_counter() + seconds
    async with connect(fleet, "127.0.0.2") as http:
        while not ttfts or time.perf_counter() < end:
            last = start = time.perf_counter()
            fields = body(100, 20) | {"stream": True}
            async with http.stream("POST", "/v1/completions", json=fields) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        (ttfts if last == start else gaps).append(now - last)
                        last = now
    return f"{len(ttfts):8} {_figures(ttfts)} {_figures(gaps)}"


def _figures(seconds: list[float]) -> str:
    p50, p99 = np.percentile(seconds, (50, 99))
    return f"{p50 * 1e3:10.1f} / {p99 * 1e3:.1f} / {max(seconds) * 1e3:.1f}".ljust(30)


async def measure(fleet: Fleet, args: argparse.Namespace) -> None:
    print(f"{'':12} requests   TTFT, ms                      gap, ms")
    print(f"{'alone':12} {await quiet(fleet, args.seconds)}", flush=True)
    async with busy(fleet, args.requests, args.choices):
        print(f"{'beside':12} {await quiet(fleet, args.seconds)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="long requests (default %(default)s)")
    parser.add_argument("--choices", type=int, default=1, help="choices of each (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="per row (default %(default)s)")
    args = parser.parse_args()
    flags = [*NODE, "--max-num-seqs", "32" if args.choices == 1 else "256"]
    with start_fleet(EMBEDDED_MODEL, prefill_flags=NODE, decode_flags=flags) as fleet:
        asyncio.run(measure(fleet, args))


if __name__ == "__main__":
    main()
