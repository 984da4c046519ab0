"""Throughput of KV block reads between two processes of this machine, compared with a plain copy of as many bytes.

    python bench/kv_transfer.py                         about half a minute; prints a table
    python bench/kv_transfer.py --json transfer.json    also writes the figures as JSON
    UCX_TLS=tcp python bench/kv_transfer.py             as between machines without RDMA
    python bench/kv_transfer.py --device cuda --block-kib 2048 --megabytes 512 --prompt-block-kib 2048
    python bench/kv_transfer.py --device cuda --pinned-source --block-kib 2048 --megabytes 512 --runs 1

Each row reads ``--megabytes`` with the NIXL connector once per repetition, from the call of ``read`` until ``poll``
returns the result; the figures are medians. "run" is the number of adjacent blocks on both sides: with 1 no blocks are
adjacent by design, "all" is one range. "descriptors" is the number of descriptors after adjacent blocks are merged.
The copy alternates with the reads, in this process: on a CPU numpy copies the same blocks; with ``--device cuda`` one
contiguous copy of as many bytes runs between the GPUs of the source and the reader (the first two, or the only one).
With ``--pinned-source``, the GPU reads pinned host memory of the source's process, and the copy is one from pinned host
memory of its own: what the source would take to load the blocks for the reader.

The line below the table is the KV of one prompt (``--prompt-blocks`` blocks of ``--prompt-block-kib``): by default
1,000 tokens of a model of 27 M parameters, 63 blocks of 128 KiB.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from connector.backends.nixl.nixl_connector import NixlConnector
from connector.setup import ConnectorSetup
from pdserve.kv.layout import FullAttentionSpec, KVLayout, KVRegion
from pdserve.records import KVRead, Peer


class Row(msgspec.Struct, frozen=True):
    """One row of the table. Times are medians over the repetitions, in seconds."""

    block_bytes: int
    run: int  # adjacent blocks
    num_blocks: int
    descriptors: int
    read_seconds: float
    copy_seconds: float

    @property
    def gigabytes(self) -> float:
        return self.num_blocks * self.block_bytes / 1e9


class Report(msgspec.Struct, frozen=True):
    machine: str
    cpus: int
    transport: str
    lanes: str  # UCX lanes
    rows: tuple[Row, ...]
    prompt: Row
    prompt_worst_seconds: float
    idle_cpu_percent: float


def main() -> None:
    options = parse_options()
    block_sizes = [kib * 1024 for kib in options.block_kib]
    total = options.megabytes * 2**20
    rows: list[Row] = []
    for block_bytes in block_sizes:
        pair = Pair(options.device, block_bytes, max(2, total // block_bytes), pinned=options.pinned_source)
        for run in options.runs:
            rows.append(pair.measure(total // block_bytes, run or total // block_bytes, options.repeat)[0])
            if len(rows) == 1:
                print(HEADING)
            print(line(rows[-1]), flush=True)
        pair.close()
    prompt_bytes = options.prompt_block_kib * 1024
    pair = Pair(options.device, prompt_bytes, 2 * options.prompt_blocks, pinned=options.pinned_source)
    prompt, worst = pair.measure(options.prompt_blocks, 1, 4 * options.repeat)
    report = Report(
        machine=platform.processor() or platform.machine(),
        cpus=os.cpu_count() or 0,
        transport=pair.connection.transport,
        lanes=pair.connection.lanes,
        rows=tuple(rows),
        prompt=prompt,
        prompt_worst_seconds=worst,
        idle_cpu_percent=pair.idle_cpu_percent(),
    )
    pair.close()
    print(summary(report))
    if options.json:
        with open(options.json, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(report), indent=2))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GB/s of KV block reads between two processes, and of a plain copy")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--pinned-source", action="store_true", help="read from pinned host memory into a GPU")
    parser.add_argument("--block-kib", type=int, nargs="+", default=[4, 16, 64, 128, 512, 2048], metavar="KIB")
    parser.add_argument(
        "--runs", type=int, nargs="+", default=[1, 4, 0], help="adjacent blocks per run; 0: all of them"
    )
    parser.add_argument("--megabytes", type=int, default=64, help="MiB per read (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=7, help="repetitions per row (default %(default)s)")
    parser.add_argument("--prompt-blocks", type=int, default=63)
    parser.add_argument("--prompt-block-kib", type=int, default=128)
    parser.add_argument("--json", metavar="FILE", help="write all figures as JSON")
    options = parser.parse_args()
    if options.pinned_source and options.device != "cuda":
        parser.error("--pinned-source needs --device cuda")
    return options


# ---------------------------------------------------------------- two processes


class HostCache:
    """Blocks in host memory, written once so that no page fault is measured."""

    def __init__(self, layout: KVLayout, index: int) -> None:
        self._blocks = np.ones((layout.num_blocks, layout.block_bytes), np.uint8)
        self._source = self._blocks
        self.region = KVRegion(self._blocks.ctypes.data, self._blocks.nbytes, "cpu", 0)

    def prepare_copies(self, pinned: bool) -> None:
        self._source = self._blocks.copy()

    def copy(self, local: NDArray[np.int64], remote: NDArray[np.int64], run: int) -> None:
        for target, source in zip(local[::run].tolist(), remote[::run].tolist(), strict=True):
            self._blocks[target : target + run] = self._source[source : source + run]


class CudaCache:
    """Blocks on the GPU with this index, or on the last GPU."""

    def __init__(self, layout: KVLayout, index: int) -> None:
        import torch

        self._torch = torch
        self._layout = layout
        device = min(index, torch.cuda.device_count() - 1)
        self._blocks = self._source = self._allocate(device)
        self.region = KVRegion(self._blocks.data_ptr(), self._blocks.nbytes, "cuda", device)

    def prepare_copies(self, pinned: bool) -> None:
        self._source = self._blocks.cpu().pin_memory() if pinned else self._allocate(0)

    def copy(self, local: NDArray[np.int64], remote: NDArray[np.int64], run: int) -> None:
        self._blocks[: len(local)].copy_(self._source[: len(remote)], non_blocking=True)
        self._torch.cuda.synchronize(self._blocks.device)

    def _allocate(self, device: int) -> Any:
        shape = (self._layout.num_blocks, self._layout.block_bytes)
        return self._torch.ones(shape, dtype=self._torch.uint8, device=f"cuda:{device}")


class PinnedCache:
    """Blocks in pinned host memory. It is a source only."""

    def __init__(self, layout: KVLayout, index: int) -> None:
        import torch

        shape = (layout.num_blocks, layout.block_bytes)
        self._blocks = torch.ones(shape, dtype=torch.uint8, pin_memory=True)
        self.region = KVRegion(self._blocks.data_ptr(), self._blocks.nbytes, "cpu", 0)


CACHES: dict[str, type[HostCache] | type[CudaCache]] = {"cpu": HostCache, "cuda": CudaCache}
SOURCE = 0  # index of a GPU
READER = 1  # index of a GPU


class Pair:
    """A source in its own process and a reader in this one, with caches of ``num_blocks`` blocks."""

    def __init__(self, device: str, block_bytes: int, num_blocks: int, *, pinned: bool) -> None:
        """``pinned``: the source has its blocks in pinned host memory."""
        self._layout = layout_of(block_bytes, num_blocks)
        context = multiprocessing.get_context("spawn")  # NIXL does not survive a fork
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(device, self._layout, theirs, pinned), daemon=True)
        self._process.start()
        self._cache = CACHES[device](self._layout, READER)
        self._cache.prepare_copies(pinned)
        self._progress = threading.Event()
        self._connector = NixlConnector(ConnectorSetup(f"reader-{os.urandom(4).hex()}"))
        self._connector.register(self._cache.region, self._layout, self._progress.set)
        self._peer: Peer = self._pipe.recv()
        self._connector.connect(self._peer)
        self._progress.wait(30)
        output = self._connector.poll()
        if not output.connected:
            raise SystemExit(f"cannot connect to the source: {output.failed_peers}")
        (self.connection,) = output.connected

    def measure(self, num_blocks: int, run: int, repeat: int) -> tuple[Row, float]:
        """Return the row, and the slowest read in seconds."""
        rng = np.random.default_rng(0)
        reads = []
        copies = []
        descriptors = 0
        for repetition in range(repeat + 1):
            local, remote = (scattered_runs(rng, self._layout.num_blocks, num_blocks, run) for _ in range(2))
            read = KVRead(repetition, self._peer.epoch, tuple(local.tolist()), tuple(remote.tolist()))
            seconds, descriptors = self._read(read)
            reads.append(seconds)
            start = time.perf_counter()
            self._cache.copy(local, remote, run)
            copies.append(time.perf_counter() - start)
        del reads[0], copies[0]  # a warm-up
        row = Row(
            self._layout.block_bytes, run, num_blocks, descriptors, statistics.median(reads), statistics.median(copies)
        )
        return row, max(reads)

    def idle_cpu_percent(self, seconds: float = 2.0) -> float:
        """Measure the CPU use of this process while connected and idle."""
        before = time.process_time()
        time.sleep(seconds)
        return 100 * (time.process_time() - before) / seconds

    def close(self) -> None:
        self._connector.close()
        self._pipe.close()
        self._process.join()

    def _read(self, read: KVRead) -> tuple[float, int]:
        """Run a read; return its seconds and the number of descriptors."""
        self._progress.clear()
        start = time.perf_counter()
        self._connector.read(read)
        while not (output := self._connector.poll()).finished_recving:
            self._progress.wait(30)
            self._progress.clear()
        seconds = time.perf_counter() - start
        (result,) = output.finished_recving
        if result.error:
            raise SystemExit(f"the read failed: {result.error}")
        return seconds, result.num_descriptors


def serve(device: str, layout: KVLayout, pipe: Connection, pinned: bool) -> None:
    """Run the source: register, send the peer's description, and wait until the pipe is closed."""
    cache = PinnedCache(layout, SOURCE) if pinned else CACHES[device](layout, SOURCE)
    connector = NixlConnector(ConnectorSetup(f"source-{os.urandom(4).hex()}"))
    rank = connector.register(cache.region, layout, lambda: None)
    pipe.send(Peer("source", "e1", (rank,)))
    try:
        pipe.recv()
    except EOFError:
        connector.close()


def layout_of(block_bytes: int, num_blocks: int) -> KVLayout:
    head_dim = block_bytes // (2 * 16 * 2)  # one layer, one head, K and V, 16 tokens of 2 bytes
    return KVLayout(num_blocks, 16, 16, 1, FullAttentionSpec(1, head_dim, "bfloat16"))


def scattered_runs(rng: np.random.Generator, total: int, wanted: int, run: int) -> NDArray[np.int64]:
    """Return ``wanted`` block ids in random runs of ``run`` adjacent blocks."""
    run = min(run, wanted)
    starts = rng.permutation(total // run)[: -(-wanted // run)] * run
    ids: NDArray[np.int64] = (starts[:, None] + np.arange(run)).ravel()[:wanted]
    return ids


# ---------------------------------------------------------------- output

HEADING = f"{'block':>9} {'run':>6} {'blocks':>7} {'descriptors':>11} {'read':>10} {'copy':>10} {'read ms':>8}"


def line(row: Row) -> str:
    run = "all" if row.run == row.num_blocks else str(row.run)
    return (
        f"{row.block_bytes // 1024:>5} KiB {run:>6} {row.num_blocks:>7} {row.descriptors:>11} "
        f"{row.gigabytes / row.read_seconds:>5.2f} GB/s {row.gigabytes / row.copy_seconds:>5.2f} GB/s "
        f"{1e3 * row.read_seconds:>8.2f}"
    )


def summary(report: Report) -> str:
    prompt = report.prompt
    return "\n".join(
        [
            f"\none prompt: {prompt.num_blocks} blocks of {prompt.block_bytes // 1024} KiB in "
            f"{1e3 * prompt.read_seconds:.2f} ms ({prompt.gigabytes / prompt.read_seconds:.2f} GB/s), slowest "
            f"{1e3 * report.prompt_worst_seconds:.2f} ms; copy {1e3 * prompt.copy_seconds:.2f} ms",
            f"idle, connected: {report.idle_cpu_percent:.2f} % of a core",
            f"transport: {report.transport}, UCX lanes: {report.lanes or '(UCX_LOG_LEVEL or UCX_LOG_FILE is set)'}",
        ]
    )


if __name__ == "__main__":
    main()
