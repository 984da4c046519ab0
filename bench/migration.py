"""How long a stream stands still when its decode node is lost, until its next token comes from another one.

    python bench/migration.py [--repeat 3]        two minutes

A prefill node and two decode nodes, simulated: real processes and connections on this machine. A client streams a
completion of a prompt of 500 tokens; after 100 tokens its decode node is struck, in each of the ways of bench/chaos.py.
Times are in ms, from then until the client has the next token, but for those that were on their way: what is measured
is the longest time between two tokens. Needs what the tests need (pip install -e '.[dev]').
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

from fleet import MODEL_NAME, Fleet, NodeProcess, start_fleet
from sabotage import KINDS, is_ready, repair, strike

from pdserve.config.embedded import EMBEDDED_MODEL

SIMULATED = ("--engine", "simulated")
STRIKE_AT, TOKENS = 100, 200


def stall(fleet: Fleet, kind: str, seed: int) -> float:
    """Seconds."""
    prompt = random.Random(seed).choices(range(3, 4096), k=500)
    body: dict[str, Any] = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True}
    struck: NodeProcess | None = None
    came: list[float] = []
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.stream("POST", f"{fleet.url}/v1/completions", json={**body, "stream": True}, timeout=60.0) as response,
    ):
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            came.append(time.monotonic())
            if len(came) == STRIKE_AT:
                struck = next(node for node in fleet.decode if node.status().running)
                pool.submit(strike, struck, kind)
    assert struck is not None, response.text
    repair(struck, kind)
    fleet.wait_until(lambda: all(map(is_ready, fleet.decode)), 30.0)
    time.sleep(2.0)  # the router has to see it, too
    return max(later - earlier for earlier, later in pairwise(came[STRIKE_AT - 1 :]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    print("| the decode node | median | longest |\n|---|---|---|")
    with start_fleet(EMBEDDED_MODEL, 1, 2, True, SIMULATED, SIMULATED) as fleet:
        for kind in KINDS:
            taken = [stall(fleet, kind, seed) * 1000 for seed in range(args.repeat)]
            print(f"| {kind} | {statistics.median(taken):.0f} | {max(taken):.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
