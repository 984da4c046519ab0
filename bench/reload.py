"""Time and memory of a reload and of sparse patches, on one runner without engine and sockets.

    python bench/make_checkpoint.py /tmp/llama-8b --shape llama-8b
    python bench/reload.py /tmp/llama-8b [--share 0.01] [--rounds 3] [any flag of a node]

A reload reads the checkpoint that is in memory, from the page cache after the first round. A patch has new values at
``--share`` of the places of each tensor, with 32-bit indices and digests; it is written to a temporary file first.
"check" is the time of ``check_weights``, while steps run; steps wait for "change" alone. Memory is the peak above the
runner's, on the host (anonymous) and on the GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save_file

from pdserve.checkpoint.safetensors_header import Tensor
from pdserve.checkpoint.weight_files import read_headers
from pdserve.config.device import detect_devices
from pdserve.config.node_options import add_node_flags, node_options_from
from pdserve.config.resolve import resolve
from pdserve.errors import PdserveError
from pdserve.weights.change import WeightChange
from runner import build
from runner.loading.stored_dtypes import STORED_DTYPES

_PERIOD = 0.002  # seconds between two looks at the host's memory


def write_patch(path: Path, model_dir: Path, share: float) -> int:
    """Write a patch of each unquantized tensor and return its bytes."""
    tensors = {name: tensor for file in read_headers(model_dir).values() for name, tensor in file.items()}
    entries: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dtype in STORED_DTYPES:
            entries[f"{name}.indices"], entries[f"{name}.values"] = _new_values(tensor, share)
    digests = {key: xxhash.xxh3_128_hexdigest(tensor.view(torch.uint8).numpy().data) for key, tensor in entries.items()}
    save_file(entries, path, digests)
    return path.stat().st_size


def _new_values(tensor: Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one place of each 1 / ``share``, and values that are small enough for any model."""
    every = round(1 / share)
    count = -(-torch.Size(tensor.shape).numel() // every)
    indices = torch.arange(count, dtype=torch.int32).mul_(every)
    indices[:-1] += torch.randint(every, (max(0, count - 1),), dtype=torch.int32)
    return indices, torch.randn(count).mul_(0.02).to(STORED_DTYPES[tensor.dtype])


@contextmanager
def peak_memory() -> Iterator[Callable[[], str]]:
    """Yield a function that returns the peaks above the memory at the start, of host and GPU."""
    before = peak = _private_bytes()
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(_PERIOD):
            peak = max(peak, _private_bytes())

    def report() -> str:
        on_gpu = torch.cuda.max_memory_allocated() - allocated if torch.cuda.is_available() else 0
        return f"host {(peak - before) / 2**20:7.0f} MiB   GPU {on_gpu / 2**20:7.0f} MiB"

    allocated = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield report
    finally:
        ended.set()
        watcher.join()


def _private_bytes() -> int:
    """Return the bytes of this process outside of file mappings."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon:")).split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.01, help="of the values of each tensor in the patch")
    parser.add_argument("--rounds", type=int, default=3)
    add_node_flags(parser)
    args = parser.parse_args()
    try:
        options = node_options_from(args)
        config = resolve(options, detect_devices(options.device, 1)[0])
        runner = build(config, lambda stage, fraction: None)
    except PdserveError as exc:
        sys.exit(str(exc))
    model_dir = Path(config.model_dir)
    stored = sum(path.stat().st_size for path in read_headers(model_dir))
    with tempfile.TemporaryDirectory() as folder:
        patch = Path(folder, "patch.safetensors")
        patch_bytes = write_patch(patch, model_dir, args.share)
        changes = (
            ("reload", WeightChange(str(model_dir)), stored),
            ("patch", WeightChange(patch=str(patch)), patch_bytes),
        )
        for name, change, num_bytes in changes * args.rounds:
            with peak_memory() as peaks:
                start = time.perf_counter()
                runner.check_weights(change)
                checked = time.perf_counter()
                runner.change_weights(change)
                changed = time.perf_counter()
                times = f"check {checked - start:7.3f} s   change {changed - checked:7.3f} s"
                print(f"{name:7} {num_bytes / 2**20:8.0f} MiB   {times}   {peaks()}", flush=True)
    runner.close()


if __name__ == "__main__":
    main()
