"""Time from a client's disconnect until its request is gone, at every stage of a request.

    python bench/disconnects.py [--repeat 20]        half a minute

A router with a simulated prefill node and a simulated decode node: real processes and connections on this machine.
Steps take 20 ms on P and 5 ms on D, with two in flight. A request reaches a stage (tests/disconnects_fleet.py); then
its client closes the connection. The time in ms ends when all blocks are free and no request waits; with other requests
at the nodes, it ends when this request no longer waits. Blocks that a step in flight writes to are freed at the end of
the step, which takes up to 40 ms on P. Needs the test dependencies (pip install -e '.[dev]').
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from disconnects_fleet import STAGES, DisconnectFleet, Stage, start_disconnect_fleet

from pdserve.checkpoint.hub import EMBEDDED_MODEL


def disconnect(fleet: DisconnectFleet, stage: Stage) -> float:
    """Disconnect the client of a request at a stage; return the seconds until the request is gone."""
    with fleet.held_at(stage) as close:
        start = time.monotonic()
        close()
        while not stage.gone(fleet.view()):
            if time.monotonic() > start + 5.0:
                raise RuntimeError("the request still exists 5 s after its client disconnected")
        return time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args()
    print("| the request is | median | longest |\n|---|---|---|")
    with start_disconnect_fleet(EMBEDDED_MODEL) as fleet:
        for name, stage in STAGES.items():
            taken = [disconnect(fleet, stage) * 1000 for _ in range(args.repeat)]
            print(f"| {name} | {statistics.median(taken):.0f} | {max(taken):.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
