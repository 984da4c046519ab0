"""Seconds until a node is ready whose weights come from the disk, and from the memory of a running peer.

    python bench/make_checkpoint.py /tmp/llama-8b --shape llama-8b
    python bench/peer_load.py /tmp/llama-8b --device cuda --reader-device cuda:1 --max-model-len 4096

Flags after the model are the nodes'; ``--reader-device`` is the device of the nodes that start beside the peer. The
files are in the page cache, so a disk is as fast as it can be. Each run prints the seconds of its phases. A line of the
node's log says what came from the peer; its seconds cover loading alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

RUNS = 3


@contextmanager
def running(flags: Sequence[str]) -> Iterator[tuple[dict[str, float], str, str]]:
    """Start a prefill node. Yield when each phase of its start began, its address, and its log so far.

    The phases are "start" (at 0 s), "listening", those that the engine reports, and "ready".
    """
    status, write = os.pipe()
    command = [sys.executable, "-m", "prefill_node", *flags, "--port", "0", "--status-fd", str(write)]
    log = os.memfd_create("log")
    started = time.perf_counter()
    with subprocess.Popen(command, pass_fds=[write], stderr=log) as process, os.fdopen(status) as lines:
        os.close(write)
        address = ""
        phases = {"start": 0.0}
        try:
            for line in lines:
                report = json.loads(line)
                address = report.get("address", address)
                phases.setdefault(report.get("stage", report["state"]), time.perf_counter() - started)
                if report["state"] == "ready":
                    yield phases, address, os.pread(log, 1 << 20, 0).decode(errors="replace")
                    return
            raise SystemExit("the node has failed; start it alone to see why")
        finally:
            process.terminate()
            process.wait()
            os.close(log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--reader-device", default="")
    args, flags = parser.parse_known_args()
    there = [args.model, "--device", args.device, *flags]
    here = [args.model, "--device", args.reader_device or args.device, *flags]
    with running([*there, "--load-from", "auto"]) as (_, address, _):  # also caches the digests
        for name, source in (
            ("disk", ("--load-from", "disk")),
            ("peer", ("--load-from", "peer", "--weight-peers", address)),
        ):
            ready = []
            for _ in range(RUNS):
                with running([*here, *source]) as (phases, _, log):
                    ready.append(phases["ready"])
                lasted = zip(phases, pairwise(phases.values()), strict=False)
                print(", ".join(f"{phase} {end - begin:.2f}" for phase, (begin, end) in lasted))
            print(
                f"from the {name}: ready after {statistics.median(ready):.2f} s ({sorted(round(x, 2) for x in ready)})"
            )
            print("\n".join(line for line in log.splitlines() if "weights: " in line))


if __name__ == "__main__":
    main()
