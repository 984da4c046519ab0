"""Seconds until a node is ready whose weights come from the disk, and from the memory of a running peer.

    python bench/make_checkpoint.py /tmp/llama-8b --shape llama-8b
    python bench/peer_load.py /tmp/llama-8b --device cuda --reader-device cuda:1 --max-model-len 4096

Flags after the model are the nodes'; ``--reader-device`` is the device of the nodes that start beside the peer. The
files are in the page cache, so a disk is as fast as it can be. A line of the node's log says what came from the peer;
its seconds are those of loading alone.
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

RUNS = 3


@contextmanager
def running(flags: Sequence[str]) -> Iterator[tuple[float, str, str]]:
    """Start a prefill node. Yield the seconds until it is ready, its address, and its log so far."""
    status, write = os.pipe()
    command = [sys.executable, "-m", "prefill_node", *flags, "--port", "0", "--status-fd", str(write)]
    log = os.memfd_create("log")
    started = time.perf_counter()
    with subprocess.Popen(command, pass_fds=[write], stderr=log) as process, os.fdopen(status) as lines:
        os.close(write)
        address = ""
        try:
            for line in lines:
                found = json.loads(line)
                address = found.get("address", address)
                if found["state"] == "ready":
                    seconds = time.perf_counter() - started
                    yield seconds, address, os.pread(log, 1 << 20, 0).decode(errors="replace")
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
            found = []
            for _ in range(RUNS):
                with running([*here, *source]) as (seconds, _, log):
                    found.append(seconds)
            print(
                f"from the {name}: ready after {statistics.median(found):.2f} s ({sorted(round(x, 2) for x in found)})"
            )
            print("\n".join(line for line in log.splitlines() if "weights: " in line))


if __name__ == "__main__":
    main()
