"""How soon every stage knows that a client has gone.

    python bench/disconnects.py [--repeat 20]        half a minute

A router, a prefill node and a decode node, simulated: real processes and connections on this machine, and steps of
20 ms on P and 5 ms on D, two in flight. A request reaches a stage (tests/disconnects_fleet.py), and its client closes
its connection. Times are in ms, from then until no node computes or holds anything for it: all blocks are free, and
nobody waits; where others stay at the nodes, until it is not among those who wait. Blocks that a step in flight writes
to are free when that has ended: that takes up to 40 ms on P. Needs what the tests need (pip install -e '.[dev]').
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from disconnects_fleet import STAGES, DisconnectFleet, Stage, start_disconnect_fleet

from pdserve.config.embedded import EMBEDDED_MODEL


def leave(fleet: DisconnectFleet, stage: Stage) -> float:
    """Seconds."""
    with fleet.held_at(stage) as close:
        start = time.monotonic()
        close()
        while not stage.gone(fleet.view()):
            if time.monotonic() > start + 5.0:
                raise RuntimeError("it does not end")
        return time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args()
    print("| the request is | median | longest |\n|---|---|---|")
    with start_disconnect_fleet(EMBEDDED_MODEL) as fleet:
        for name, stage in STAGES.items():
            taken = [leave(fleet, stage) * 1000 for _ in range(args.repeat)]
            print(f"| {name} | {statistics.median(taken):.0f} | {max(taken):.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
