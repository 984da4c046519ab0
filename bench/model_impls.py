"""Cost of generality: decode steps of V1 with native layers and with those of transformers, alternating in one process.

python bench/make_checkpoint.py /tmp/q
python bench/model_impls.py /tmp/q --batches 1,8,32
python bench/model_impls.py /tmp/l --batches 1,32 --device cuda:0 --load-format dummy
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

import torch

import runner
from pdserve.config.device import detect_device
from pdserve.config.node_config import NodeOptions
from pdserve.config.resolve import resolve
from pdserve.config.runner_oracle import VARIABLE
from pdserve.protocols import ModelRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from stepper import Stepper

IMPLS = ("native", "transformers")
PROMPT = 128  # tokens
_KV_BYTES = 8 << 30  # on a GPU, which both share


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of a checkpoint with native layers")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    runners = {impl: _build(args, impl) for impl in IMPLS}
    steppers = {impl: Stepper(each) for impl, each in runners.items()}
    for batch in map(int, args.batches.split(",")):
        native, library = (1e3 * statistics.median(times) for times in _step_times(steppers, batch, args.steps))
        print(
            f"batch {batch}: native {native:.2f} ms, transformers {library:.2f} ms, {library / native:.2f} ×",
            flush=True,
        )
    for each in runners.values():
        each.close()
    return 0


def _build(args: argparse.Namespace, impl: str) -> ModelRunner:
    options = NodeOptions(
        model=args.model,
        device=args.device,
        load_format=args.load_format,
        model_impl=impl,
        max_model_len=1024,
        kv_cache_memory=_KV_BYTES if args.device != "cpu" else None,
    )
    config = resolve(options, detect_device(args.device), {VARIABLE: "0"})
    return runner.build(config, lambda stage, fraction: None)


def _step_times(steppers: dict[str, Stepper], batch: int, steps: int) -> list[list[float]]:
    """Return the seconds of each decode step, of each implementation."""
    rng = random.Random(0)
    prompts = [[rng.randrange(4096) for _ in range(PROMPT)] for _ in range(batch)]
    times: list[list[float]] = []
    for stepper in steppers.values():
        for seq in list(stepper.live):
            stepper.finish(seq)
        for prompt in prompts:
            stepper.add(prompt)
        times.append([])
    for step in range(steps + 4):
        for stepper, found in zip(steppers.values(), times, strict=True):
            start = time.perf_counter()
            stepper.step()
            if step >= 4:  # the first ones compute the prompts and warm up
                found.append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    torch.set_num_threads(2)
    sys.exit(main())
