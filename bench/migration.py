"""Stall of a stream when its decode node fails and the request migrates to another one.

    python bench/migration.py [--repeat 3]        two minutes

A simulated prefill node and two simulated decode nodes: real processes and connections on this machine. A client
streams a completion of a prompt of 500 tokens; after 100 tokens its decode node gets each kind of fault of
bench/chaos.py. The figure is the longest gap between two tokens after the fault, in ms, so tokens already on their way
do not count. Needs the test dependencies (pip install -e '.[dev]').

    python bench/migration.py --streams 40        half a minute

``--streams`` streams of 1,200 tokens run on each decode node when one node's engine is stopped. The figures are the
longest gap of each stream, and the mean share of free blocks on the other node while requests wait there.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from fault_injection import KINDS, inject, is_ready, recover
from fleet import MODEL_NAME, Fleet, NodeProcess, start_fleet

from pdserve.checkpoint.hub import EMBEDDED_MODEL

SIMULATED = ("--engine", "simulated")
FAULT_AT = 100  # output tokens
TOKENS = 200  # output tokens
LONG_TOKENS = 1200  # output tokens
STOP_AFTER = 3.0  # seconds


def new_body(seed: int, max_tokens: int) -> dict[str, Any]:
    prompt = random.Random(seed).choices(range(3, 4096), k=500)
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    return body | {"temperature": 0.0}


def stall(fleet: Fleet, kind: str, seed: int) -> float:
    """Stream a completion, inject a fault into its decode node, and return the longest gap in seconds."""
    body = new_body(seed, TOKENS)
    failed_node: NodeProcess | None = None
    arrivals: list[float] = []
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, timeout=60.0) as response,
    ):
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            arrivals.append(time.monotonic())
            if len(arrivals) == FAULT_AT:
                failed_node = next(node for node in fleet.decode if node.status().running)
                pool.submit(inject, failed_node, kind)
    assert failed_node is not None, response.text
    recover(failed_node, kind)
    fleet.wait_until(lambda: all(map(is_ready, fleet.decode)), 30.0)
    time.sleep(2.0)  # until the router also knows it as ready
    return max(later - earlier for earlier, later in pairwise(arrivals[FAULT_AT - 1 :]))


def stream(url: str, seed: int) -> list[float]:
    """Stream a long completion; return when its tokens arrived."""
    options: dict[str, Any] = {"json": new_body(seed, LONG_TOKENS), "timeout": 120.0}
    with httpx.stream("POST", f"{url}/v1/completions", **options) as response:
        return [time.monotonic() for line in response.iter_lines() if line.startswith("data: {")]


def stalls(fleet: Fleet, streams: int) -> str:
    """Stop one of two loaded decode nodes; return a row with the longest gap of each stream, in seconds."""
    failed, other = fleet.decode
    with ThreadPoolExecutor(2 * streams) as pool:
        running = [pool.submit(stream, fleet.url, seed) for seed in range(2 * streams)]
        time.sleep(STOP_AFTER)
        ran = [node.status().running for node in fleet.decode]
        failed.stop("engine")
        free: list[float] = []
        while not all(future.done() for future in running):
            status = other.status()
            if status.waiting:
                free.append(status.free_blocks / status.total_blocks)
            time.sleep(0.05)
    failed.resume("engine")
    gaps = [max(later - earlier for earlier, later in pairwise(future.result())) for future in running]
    waited = f"{len(free) * 0.05:.0f} | {statistics.fmean(free):.0%}" if free else "0 |"
    return f"{ran[0]}, {ran[1]} | {statistics.median(gaps):.1f} | {max(gaps):.1f} | {waited}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--streams", type=int, default=0, metavar="N", help="streams on each decode node")
    args = parser.parse_args()
    if args.streams:
        print("| KV cache | running | median gap, s | longest | requests wait, s | free blocks meanwhile |")
        print("|---|---|---|---|---|---|")
        for memory in ("64MiB", "256MiB"):
            flags = (*SIMULATED, "--kv-cache-memory", memory)
            with start_fleet(EMBEDDED_MODEL, 1, 2, True, flags, flags) as fleet:
                print(f"| {memory} | {stalls(fleet, args.streams)} |", flush=True)
        return 0
    print("| fault of the decode node | median | longest |\n|---|---|---|")
    with start_fleet(EMBEDDED_MODEL, 1, 2, True, SIMULATED, SIMULATED) as fleet:
        for kind in KINDS:
            taken = [stall(fleet, kind, seed) * 1000 for seed in range(args.repeat)]
            print(f"| {kind} | {statistics.median(taken):.0f} | {max(taken):.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
