"""Seconds until a node is ready, with the digests of its weights computed and cached; and at its first start on a GPU.

    python bench/make_checkpoint.py /tmp/q --shape qwen3-0.6b --set vocab_size=4096 --set num_hidden_layers=48
    python bench/start_time.py /tmp/q --device cpu --max-model-len 512 --kv-cache-memory 128MiB
    python bench/start_time.py /tmp/q --first-start --device cuda --load-format dummy

Flags after the model are the node's. The runs alternate; the files are in the page cache. Before the runs it prints the
time to digest all weights alone, on all threads.

With ``--first-start`` the caches of FlashInfer's and Triton's kernels are empty. A node starts as its flags say,
compiles FlashInfer's kernels while it serves, and starts again. Then one starts with ``--attention-backend flashinfer``
and empty caches, which waits for the compiler.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pdserve.checkpoint.digest_cache import NAME
from pdserve.checkpoint.weight_digests import checkpoint_digests, fold_digests

RUNS = 7
FIRST_START = "--first-start"
COMPILE_SECONDS = 400.0
# In the node's log.
COMPILED = "kernels were compiled in"
NOT_COMPILED = "kernels could not be compiled"


@contextmanager
def ready_node(
    flags: Sequence[str], log: Path = Path(os.devnull), environ: Mapping[str, str] = os.environ
) -> Iterator[float]:
    """Start a prefill node; yield the seconds until it is ready. Its log goes to a file."""
    status, write = os.pipe()
    command = [sys.executable, "-m", "prefill_node", *flags, "--port", "0", "--status-fd", str(write)]
    started = time.perf_counter()
    with (
        log.open("w") as output,
        subprocess.Popen(command, pass_fds=[write], stderr=output, env=environ) as process,
        os.fdopen(status) as lines,
    ):
        os.close(write)
        try:
            if not any(json.loads(line)["state"] == "ready" for line in lines):
                raise SystemExit("the node has failed; start it alone to see why")
            yield time.perf_counter() - started
        finally:
            process.terminate()


def ready_seconds(flags: Sequence[str]) -> float:
    with ready_node(flags) as seconds:
        return seconds


def first_starts(flags: Sequence[str]) -> None:
    """Print the seconds of starts with empty caches of kernels, and of the start after the first one."""
    with tempfile.TemporaryDirectory(prefix="pdserve-kernels-") as folder:
        log = Path(folder, "log")
        environ = empty_caches(Path(folder, "first"))
        with ready_node(flags, log, environ) as seconds:
            print(f"first start: ready after {seconds:.1f} s", flush=True)
            print(wait_compiled(log), flush=True)
        with ready_node(flags, log, environ) as seconds:
            print(f"second start: ready after {seconds:.1f} s", flush=True)
        waiting = [*flags, "--attention-backend", "flashinfer"]
        with ready_node(waiting, log, empty_caches(Path(folder, "waiting"))) as seconds:
            print(f"first start with --attention-backend flashinfer: ready after {seconds:.1f} s")


def empty_caches(folder: Path) -> dict[str, str]:
    """Return the environment of a node on a machine where nothing is compiled."""
    return {**os.environ, "FLASHINFER_WORKSPACE_BASE": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}


def wait_compiled(log: Path) -> str:
    """Wait until a node has compiled the kernels for its next start. Return its log line."""
    end = time.monotonic() + COMPILE_SECONDS
    while time.monotonic() < end:
        for line in log.read_text().splitlines():
            if COMPILED in line or NOT_COMPILED in line:
                return line
        time.sleep(0.5)
    raise SystemExit(f"nothing was compiled within {COMPILE_SECONDS:g} s:\n{log.read_text()}")


def main() -> None:
    flags = sys.argv[1:]
    if FIRST_START in flags:
        first_starts([flag for flag in flags if flag != FIRST_START])
        return
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
