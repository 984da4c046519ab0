"""Seconds until a node is ready, with the digests of its weights computed and cached.

    python bench/make_checkpoint.py /tmp/q --shape qwen3-0.6b --set vocab_size=4096 --set num_hidden_layers=48
    python bench/start_time.py /tmp/q --device cpu --max-model-len 512 --kv-cache-memory 128MiB

Flags after the model are the node's. The runs alternate; the files are in the page cache. Before the runs it prints the
time to digest all weights alone, on all threads.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pdserve.checkpoint.digest_cache import NAME
from pdserve.checkpoint.weight_digests import checkpoint_digests, fold_digests

RUNS = 7


def ready_seconds(flags: Sequence[str]) -> float:
    """Start a prefill node; return the seconds until it is ready."""
    status, write = os.pipe()
    command = [sys.executable, "-m", "prefill_node", *flags, "--port", "0", "--status-fd", str(write)]
    started = time.perf_counter()
    with subprocess.Popen(command, pass_fds=[write], stderr=subprocess.DEVNULL) as process, os.fdopen(status) as lines:
        os.close(write)
        try:
            for line in lines:
                if json.loads(line)["state"] == "ready":
                    return time.perf_counter() - started
            raise SystemExit("the node has failed; start it alone to see why")
        finally:
            process.terminate()


def main() -> None:
    flags = sys.argv[1:]
    cache = Path(flags[0], NAME)
    for _ in range(2):  # the first reads the files into the page cache
        cache.unlink(missing_ok=True)
        started = time.perf_counter()
        groups = fold_digests(checkpoint_digests(Path(flags[0])).tensors)
        alone = time.perf_counter() - started
    computed = list[float]()
    cached = list[float]()
    for _ in range(RUNS):
        cache.unlink(missing_ok=True)
        computed.append(ready_seconds(flags))
        cached.append(ready_seconds(flags))
    for name, seconds in (("computed", computed), ("cached", cached)):
        sorted_seconds = ", ".join(f"{value:.2f}" for value in sorted(seconds))
        print(f"digests {name}: ready after {statistics.median(seconds):.2f} s ({sorted_seconds})")
    print(f"{len(groups)} tensor groups; digests alone: {alone:.2f} s")


if __name__ == "__main__":
    main()
