"""Steps of V1 and V2 beside each other, on one GPU: rows for the table "V1 and V2" of docs/numbers.md.

    python bench/both_runners.py --device cuda                        all shapes, about five minutes on an H200
    python bench/both_runners.py --device cuda --shapes qwen2.5-7b    any flag of bench/engine_steps.py may follow

Each shape of ``make_checkpoint.py`` gets a config alone and random weights. ``engine_steps.py`` measures it with
PDSERVE_USE_V2_MODEL_RUNNER=0 and =1. Large models have some of their layers only: a ratio of runners depends on the
work of a layer. A row marks a figure that is lower by a hundredth or more. ``v2_is_faster`` of a family
(pdserve/model/families.py) says what the row of its architecture shows; tests/cli/test_oracle.py compares them.

First of all, the kernels of the shapes are compiled, three shapes at a time, because Triton and FlashInfer take minutes
for them one by one; ``--no-compile`` leaves this out where they are cached.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from hybrid_shapes import first_layers
from make_checkpoint import SHAPES, make

from pdserve.config.runner_oracle import VARIABLE

BATCHES = (1, 32, 256)
PROMPTS = (512, 8192)
RUNNERS = {"V1": "0", "V2": "1"}
COMPILING_AT_ONCE = 3  # shapes whose models are on the GPU together; all need more than the 141 GB of an H200
MARGIN = 0.99  # a figure in bold is below this share of the other one
STEPS = ("--steps", "32", "--repeat", "1", "--max-model-len", "16384", "--speculate", "off")
#: The models share the GPU meanwhile. Starts compile, so few steps follow.
COMPILING = ("--batches", "1", "--prompts", "64", "--kv-cache-memory", "1GiB", "--steps", "16", *STEPS[2:])


class Measured(NamedTuple):
    """A shape whose runners are compared."""

    shape: str  # a name in SHAPES of make_checkpoint.py
    name: str  # in the table
    num_layers: int | None = None  # the first layers only; None: all of the shape
    backend: str = "flashinfer"  # that a node on Hopper chooses
    few_layers: int = 4  # in which each kind of layer occurs

    @property
    def architecture(self) -> str:
        (architecture,) = SHAPES[self.shape]["architectures"]
        return str(architecture)

    @property
    def label(self) -> str:
        layers = f", {self.num_layers} layers" if self.num_layers else ""
        return f"{self.name}{layers} (`{self.architecture}`)"

    def config(self, num_layers: int | None, changes: dict[str, Any]) -> dict[str, Any]:
        shape = SHAPES[self.shape]
        layers = first_layers(shape, num_layers) if num_layers else {}
        return shape | layers | changes


MEASURED = (
    Measured("qwen3-0.6b", "Qwen3 0.6B, bf16"),
    Measured("qwen2.5-7b", "Qwen2.5 7B, bf16", num_layers=14),
    Measured("mimo-7b", "MiMo 7B, bf16", num_layers=12),
    Measured("qwen3-next-12l", "Qwen3-Next-80B-A3B, bf16", num_layers=12),
    Measured("qwen3.5-8l", "Qwen3.5-27B, bf16", num_layers=8),
    Measured("qwen3.5-35b-a3b", "Qwen3.5-35B-A3B, bf16", num_layers=12),
    Measured("deepseek-v2-lite", "DeepSeek-V2-Lite, bf16", num_layers=9),
    Measured("deepseek-v3-5l-fp8", "DeepSeek-V3, FP8", num_layers=5),
    Measured("glm-4.7-flash", "GLM-4.7-Flash, bf16", num_layers=12),
    Measured("gemma-4-26b-a4b", "Gemma 4 26B-A4B, bf16", num_layers=12, backend="triton"),
    Measured("lfm2-1.2b", "LFM2 1.2B, bf16"),
    Measured("lfm2-8b-a1b", "LFM2 8B-A1B, bf16"),
    Measured("granite-4-h-small", "Granite 4 h-small, bf16", num_layers=10, few_layers=6),
    Measured("nemotron-3-nano", "Nemotron 3 Nano, bf16", num_layers=12, few_layers=6),
    Measured("falcon-h1-7b", "Falcon-H1 7B, bf16", num_layers=12),
)
BY_SHAPE = {figures.shape: figures for figures in MEASURED}


def compile_all(shapes: Sequence[Measured], folder: Path, changes: dict[str, Any], flags: Sequence[str]) -> None:
    """Run few layers of each shape on V2; V1 has hardly other kernels. Raises RuntimeError."""

    def compile_one(measured: Measured) -> None:
        model = folder / f"{measured.shape}-compile"
        make(model, measured.config(measured.few_layers, changes), weights=False)
        output_of(start(model, "V2", [*COMPILING, *flags]), f"{measured.shape} on V2")

    with ThreadPoolExecutor(COMPILING_AT_ONCE) as pool:
        list(pool.map(compile_one, shapes))


def start(model: Path, runner: str, flags: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).with_name("engine_steps.py")), str(model), "--load-format", "dummy"]
    environ = os.environ | {VARIABLE: RUNNERS[runner]}
    return subprocess.Popen([*command, *flags], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def measure(model: Path, runner: str, flags: Sequence[str]) -> list[float]:
    """Return the milliseconds of a decode step by batch, then of a prefill by prompt."""
    batches, prompts = (",".join(map(str, sizes)) for sizes in (BATCHES, PROMPTS))
    process = start(model, runner, ["--batches", batches, "--prompts", prompts, *STEPS, *flags])
    output = output_of(process, f"{model.name} on {runner}")
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [row.get("ms_per_step", row.get("ms")) for row in rows if "decode_batch" in row or "prompts" in row]


def output_of(process: subprocess.Popen[str], name: str) -> str:
    """Wait for its end. Raises RuntimeError with its last output unless that is status 0."""
    output, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{name} ended with status {process.returncode}: {errors[-2000:]}")
    return output


def row_of(label: str, v1: Sequence[float], v2: Sequence[float]) -> str:
    """Return a row of the table, with the lower figure of each pair in bold."""
    cells = [f"{_bold(old, new)} / {_bold(new, old)}" for old, new in zip(v1, v2, strict=True)]
    return f"| {' | '.join([label, *cells])} |"


def _bold(figure: float, other: float) -> str:
    text = f"{figure:.3g}" if figure < 100 else f"{figure:.1f}"
    return f"**{text}**" if figure < MARGIN * other else text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=lambda text: [BY_SHAPE[name] for name in text.split(",")], default=MEASURED)
    parser.add_argument("--no-compile", action="store_true", help="kernels are cached")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", help="a field of each config.json")
    args, flags = parser.parse_known_args()
    changes = {name: json.loads(value) for name, value in (item.split("=", 1) for item in args.set)}
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not args.no_compile:
            compile_all(args.shapes, folder, changes, flags)
            print(f"compiled after {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        for measured in args.shapes:
            make(folder / measured.shape, measured.config(measured.num_layers, changes), weights=False)
            v1, v2 = (measure(folder / measured.shape, runner, flags) for runner in RUNNERS)
            print(row_of(measured.label, v1, v2), flush=True)
    print(f"done after {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
