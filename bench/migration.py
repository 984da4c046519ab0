"""Stall of a stream when its decode node fails and the request migrates to another one.

    python bench/migration.py [--repeat 3]        two minutes

A simulated prefill node and two simulated decode nodes: real processes and connections on this machine. A client
streams a completion of a prompt of 500 tokens; after 100 tokens its decode node gets each kind of fault of
bench/chaos.py. The figure is the longest gap between two tokens after the fault, in ms, so tokens already on their way
do not count. Needs the test dependencies (pip install -e '.[dev]').
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

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fault_injection import KINDS, inject, is_ready, recover
from fleet import MODEL_NAME, Fleet, NodeProcess, start_fleet

from pdserve.config.hub import EMBEDDED_MODEL

SIMULATED = ("--engine", "simulated")
FAULT_AT, TOKENS = 100, 200  # output tokens


def stall(fleet: Fleet, kind: str, seed: int) -> float:
    """Stream a completion, inject a fault into its decode node, and return the longest gap in seconds."""
    prompt = random.Random(seed).choices(range(3, 4096), k=500)
    body: dict[str, Any] = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True}
    failed_node: NodeProcess | None = None
    arrivals: list[float] = []
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.stream("POST", f"{fleet.url}/v1/completions", json={**body, "stream": True}, timeout=60.0) as response,
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    print("| fault of the decode node | median | longest |\n|---|---|---|")
    with start_fleet(EMBEDDED_MODEL, 1, 2, True, SIMULATED, SIMULATED) as fleet:
        for kind in KINDS:
            taken = [stall(fleet, kind, seed) * 1000 for seed in range(args.repeat)]
            print(f"| {kind} | {statistics.median(taken):.0f} | {max(taken):.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
