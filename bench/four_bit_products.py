"""Products with 4-bit weights on a GPU: check every form and kernel, then time tile sizes beside bfloat16.

    PYTHONPATH=.:tests/support python bench/four_bit_products.py --out DIRECTORY --seconds 200

The linear layers of Llama 8B and the experts of Qwen3-30B-A3B, by rows. A cell's time is that of a CUDA graph with many
products of different weights, which the L2 cache does not hold. ``--out`` gets all times in ``four_bit_products.json``.
Configurations are compiled by as many processes as the machine has processors.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from four_bit_weights import AWQ, MXFP4, NVFP4, plain_weight, random_stored, relative_error
from torch import Tensor

from runner.kernels.device_limits import processors_of
from runner.kernels.experts.grouped_gemm import grouped_gemm
from runner.kernels.experts.grouped_tiles import GroupedRows, group_rows
from runner.kernels.four_bits import grouped, products
from runner.kernels.four_bits.products import Tiles
from runner.kernels.four_bits.stack import FourBitForm
from runner.kernels.four_bits.weights import FourBitExperts

BYTES_PER_SECOND = 4.8e12  # an H200's memory, by its datasheet
CACHE_BYTES = 160 << 20  # weights of a graph; more than twice the L2 cache
FORMS = {"nvfp4": NVFP4, "int4 zeros": AWQ}
CHECKED = {
    **FORMS,
    "mxfp4": MXFP4,
    "int4 g32 zeros": FourBitForm("int4", 32, True, torch.float16),
    "int4 g32 bf16": FourBitForm("int4", 32, False, torch.bfloat16),
    "int4 g64 f32": FourBitForm("int4", 64, True, torch.float32),
    "int4 g128 bf16": FourBitForm("int4", 128, True, torch.bfloat16),
    "int4 channel": FourBitForm("int4", 0, True, torch.float16),
}
LINEARS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
EXPERTS = {"gate_up": (1536, 2048), "down": (2048, 768)}
NUM_EXPERTS = 128
TOP_K = 8
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 8192)
SPLITS = (1, 2, 3, 4, 6, 8)
MOST_SPLIT_ROWS = 256
DEVICE = torch.device("cuda")

#: Outputs of a tile, blocks in a step, warps, stages and registers, by rows of a tile.
LINEAR_TILES = {
    8: [
        (64, 2, 4, 4, 0),
        (64, 4, 4, 3, 0),
        (64, 4, 4, 6, 0),
        (64, 4, 4, 8, 0),
        (64, 8, 4, 4, 0),
        (128, 4, 4, 6, 0),
        (128, 2, 4, 4, 0),
        (128, 4, 4, 3, 0),
        (256, 1, 4, 4, 0),
        (256, 2, 4, 3, 0),
        (256, 2, 8, 3, 0),
        (256, 4, 8, 3, 0),
    ],
    16: [(64, 2, 4, 4, 0), (128, 2, 4, 3, 0)],
    32: [(64, 2, 4, 4, 0), (128, 2, 4, 3, 0), (128, 1, 4, 5, 0), (128, 2, 8, 3, 80), (256, 2, 8, 3, 0)],
    64: [(64, 2, 4, 3, 0), (128, 2, 4, 3, 0), (128, 2, 8, 3, 0), (256, 1, 8, 4, 0), (256, 2, 16, 3, 0)],
    128: [
        (64, 1, 4, 4, 0),
        (64, 1, 4, 3, 0),
        (64, 2, 4, 2, 0),
        (64, 2, 4, 3, 0),
        (128, 1, 8, 4, 0),
        (128, 2, 8, 3, 0),
        (256, 1, 16, 4, 0),
    ],
    256: [(64, 1, 4, 3, 0), (128, 1, 8, 4, 0), (128, 1, 8, 3, 0), (128, 2, 8, 2, 0)],
}
EXPERT_TILES = {
    8: [(64, 2, 4, 4, 0), (128, 2, 4, 3, 0), (128, 4, 4, 3, 0), (256, 2, 4, 3, 0)],
    16: [(128, 1, 4, 4, 0), (128, 2, 4, 3, 0), (128, 4, 4, 3, 0)],
    32: [(128, 1, 4, 4, 0), (128, 2, 4, 3, 0), (256, 2, 8, 3, 0)],
    64: [(128, 1, 4, 4, 0), (128, 2, 4, 3, 0), (128, 2, 8, 3, 0)],
    128: [(64, 1, 4, 4, 0), (128, 1, 8, 4, 0), (128, 1, 8, 4, 128), (256, 1, 16, 4, 0)],
}
CHECKED_TILES = (
    (1, Tiles(8, 64, 1, 2, 4, 4)),
    (5, Tiles(8, 128, 3, 1, 4, 4)),
    (8, Tiles(8, 64, 4, 4, 4, 3)),
    (30, Tiles(32, 128, 2, 2, 4, 3)),
    (64, Tiles(64, 128, 2, 2, 8, 3)),
    (100, Tiles(64, 64, 1, 2, 4, 3)),
    (300, Tiles(128, 128, 1, 1, 8, 3)),
    (33, None),
    (600, None),
)


class Task(NamedTuple):
    """A kernel to compile."""

    experts: bool
    form: str
    tiles: Tiles


def random_stack(form: FourBitForm, experts: int, outputs: int, inputs: int) -> FourBitExperts:
    stack = FourBitExperts(experts, outputs, inputs, form, DEVICE, use_triton=True)
    for expert in range(experts):
        stack.pack(expert, *random_stored(form, outputs, inputs, expert, DEVICE))
    return stack


class Checks:
    """Relative errors beside those of bfloat16's products with rounded weights; what is wrong."""

    def __init__(self) -> None:
        self.wrong = list[str]()
        self.largest = 0.0

    def add(self, label: str, error: float, usual: float) -> None:
        self.largest = max(self.largest, error)
        if not error <= 1.05 * usual + 1e-6:
            self.wrong.append(f"{label}: error {error:.2e}, bfloat16's {usual:.2e}")

    def product(self, label: str, compute: Callable[[], Tensor], expected: Tensor, usual: float) -> None:
        try:
            first = compute()
            again = compute()
            self.add(label, relative_error(first, expected), usual)
            if not torch.equal(first, again):
                self.wrong.append(f"{label}: results differ from run to run")
        except Exception as failure:
            self.wrong.append(f"{label}: {type(failure).__name__} {str(failure)[:200]}")


def check_form(name: str) -> tuple[float, list[str]]:
    """Return the largest relative error, and what is wrong."""
    checks = Checks()
    check_linear(name, checks, 512, 1024)
    check_linear(name, checks, 200, 96 if CHECKED[name].group in (0, 16, 32) else 640)
    check_experts(name, checks)
    return checks.largest, checks.wrong


def checked_form(name: str, inputs: int) -> FourBitForm:
    form = CHECKED[name]
    return form if form.group else form._replace(group=inputs)


def check_linear(name: str, checks: Checks, outputs: int, inputs: int) -> None:
    form = checked_form(name, inputs)
    stored = random_stored(form, outputs, inputs, 7, DEVICE)
    stack = FourBitExperts(1, outputs, inputs, form, DEVICE, use_triton=True)
    stack.pack(0, *stored)
    label = f"{name} {outputs} x {inputs}"
    for before, after in zip(stored, stack.unpack(0), strict=True):
        if before is not None and after is not None and before.flatten().tolist() != after.flatten().tolist():
            checks.wrong.append(f"{label}: a weight is not unpacked as it was")
    weight = plain_weight(form, stored)
    rounded = weight.to(torch.bfloat16)
    checks.add(f"{label} dequantized", relative_error(stack.dequantized(0, torch.float32), weight), 0.0)
    kernel = products.dequantize(stack, 0, torch.float32)
    checks.add(f"{label} dequantized by its kernel", relative_error(kernel, weight), 0.0)
    bias = torch.randn(outputs, device=DEVICE).to(torch.bfloat16)
    for rows, tiles in CHECKED_TILES:
        x = torch.randn(rows, inputs, device=DEVICE).to(torch.bfloat16)
        expected = x.double() @ weight.t() + bias.double()
        usual = relative_error(F.linear(x, rounded, bias), expected)
        cut = tuple(tiles) if tiles else "chosen"
        checks.product(f"{label} rows {rows} {cut}", partial(products.product, x, stack, bias, tiles), expected, usual)
    half = torch.randn(20, inputs, device=DEVICE).half()
    expected = half.double() @ weight.t()
    usual = relative_error(half @ weight.t().half(), expected)
    checks.product(f"{label} float16", partial(products.product, half, stack), expected, usual)


def check_experts(name: str, checks: Checks) -> None:
    experts = 6
    outputs = 136
    inputs = 256
    form = checked_form(name, inputs)
    stack = random_stack(form, experts, outputs, inputs)
    stored = [random_stored(form, outputs, inputs, expert, DEVICE) for expert in range(experts)]
    weight = torch.stack([plain_weight(form, part) for part in stored])
    bias = torch.randn(experts, outputs, device=DEVICE).to(torch.bfloat16)
    for tokens in (1, 5, 40, 300):
        x = torch.randn(tokens, inputs, device=DEVICE).to(torch.bfloat16)
        chosen = torch.rand(tokens, experts, device=DEVICE).topk(2).indices.to(torch.int32)
        rows = stack.rows_of_experts(chosen, range(experts))
        at = chosen.flatten().long()
        repeated = x.repeat_interleave(2, 0)
        expected = torch.einsum("ai,aoi->ao", repeated.double(), weight[at]) + bias[at].double()
        usual = torch.einsum("ai,aoi->ao", repeated.float(), weight[at].bfloat16().float()) + bias[at].float()
        checks.product(
            f"{name} experts, {tokens} tokens in tiles of {rows.tile_rows}",
            partial(stack.product, x, rows, bias),
            expected,
            relative_error(usual.bfloat16(), expected),
        )


def use_dependent_launch(most_rows: int) -> None:
    products.DEPENDENT_ROWS = most_rows


_stacks = dict[tuple[bool, str], FourBitExperts]()


def compile_task(task: Task) -> str:
    """Compile and run a kernel once, so that the cache has it. Return the problem, if any."""
    try:
        outputs, inputs = EXPERTS["gate_up"] if task.experts else LINEARS["o"]  # others have the same kernels
        key = task.experts, task.form
        if key not in _stacks:
            count = 1 if not task.experts else 2
            _stacks[key] = FourBitExperts(count, outputs, inputs, FORMS[task.form], DEVICE, use_triton=True)
        stack = _stacks[key]
        for tokens in (1, 8) if task.tiles.rows == 8 else (task.tiles.rows,):
            if task.experts:
                chosen = torch.arange(tokens * TOP_K, device=DEVICE, dtype=torch.int32).view(tokens, TOP_K) % 2
                rows = rows_in_tiles(chosen, 2, task.tiles.rows)
                x = torch.zeros(tokens * expert_rows(outputs), inputs, device=DEVICE, dtype=torch.bfloat16)
                grouped.grouped_product(x, stack, rows, None, task.tiles)
            else:
                x = torch.zeros(tokens, inputs, device=DEVICE, dtype=torch.bfloat16)
                for splits in (1, 2) if task.tiles.rows <= MOST_SPLIT_ROWS else (1,):
                    products.product(x, stack, None, task.tiles._replace(splits=splits))
        torch.cuda.synchronize()
        return ""
    except Exception as failure:
        return f"{type(failure).__name__}: {str(failure)[:200]}"


def expert_rows(outputs: int) -> int:
    """Return rows of an expert layer's input for each token: the second product's are of assignments."""
    return 1 if outputs == EXPERTS["gate_up"][0] else TOP_K


def rows_in_tiles(experts: Tensor, count: int, tile_rows: int) -> GroupedRows:
    return group_rows(experts, range(count), tile_rows, tile_rows)


def time_of(launches: Sequence[Callable[[], Any]], repeats: int = 5) -> float:
    """Return the seconds of a launch, when all run one after the other in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = list[float]()
    for _ in range(repeats):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / len(launches))
    return statistics.median(times)


class Sweep:
    """Times of all cells, until the time is up."""

    def __init__(self, deadline: float, problems: dict[Task, str]) -> None:
        self.deadline = deadline
        self.problems = problems
        self.cells = list[dict[str, Any]]()

    def has_time(self) -> bool:
        return time.monotonic() < self.deadline

    def measure(self, launches: Sequence[Callable[[], Any]], **facts: Any) -> float:
        try:
            seconds = time_of(launches)
            facts["us"] = round(seconds * 1e6, 2)
        except Exception as failure:
            facts["problem"] = f"{type(failure).__name__}: {str(failure)[:200]}"
            seconds = float("inf")
        self.cells.append(facts)
        return seconds

    def linear(self, name: str, shape: tuple[int, int], row_counts: tuple[int, ...]) -> None:
        outputs, inputs = shape
        plain = torch.randn(max(1, CACHE_BYTES // (2 * outputs * inputs)) + 1, outputs, inputs, device=DEVICE).to(
            torch.bfloat16
        )
        inputs_of = {rows: torch.randn(rows, inputs, device=DEVICE).to(torch.bfloat16) for rows in row_counts}
        for rows, x in inputs_of.items():
            weights = plain[:2] if rows > 1000 else plain
            self.measure([partial(F.linear, x, weight) for weight in weights], layer=name, rows=rows, form="bfloat16")
        del plain
        for form_name, form in FORMS.items():
            stack = random_stack(form, 1, outputs, inputs)
            count = CACHE_BYTES // stack.bytes_read + 2
            stacks = [stack, *(copy_of(stack) for _ in range(count - 1))]
            for rows, x in inputs_of.items():
                chosen = products.choose_tiles(rows, outputs, inputs, form, torch.bfloat16, processors_of(DEVICE))
                for tiles in dict.fromkeys((chosen, *linear_tiles(rows, outputs, inputs))):
                    if not self.has_time():
                        return
                    facts = {"layer": name, "rows": rows, "form": form_name, "tiles": list(tiles) if tiles else None}
                    facts |= {"bytes": stack.bytes_read, "chosen": tiles == chosen}
                    key = tiles and Task(False, form_name, tiles._replace(splits=1))
                    problem = self.problems.get(key, "") if key else ""
                    if problem:
                        self.cells.append({**facts, "problem": problem})
                        continue
                    used = stacks[:2] if rows > 1000 else stacks
                    if tiles is None:
                        launches = [partial(dequantized_product, x, part) for part in used]
                    else:
                        launches = [partial(products.product, x, part, None, tiles) for part in used]
                    self.measure(launches, **facts)

    def experts(self, name: str, shape: tuple[int, int], row_counts: tuple[int, ...]) -> None:
        outputs, inputs = shape
        generator = torch.Generator(DEVICE).manual_seed(3)
        plain = torch.randn(NUM_EXPERTS, outputs, inputs, device=DEVICE).to(torch.bfloat16)
        routes = dict[int, list[Tensor]]()
        xs = dict[int, Tensor]()
        for rows in row_counts:
            graphs = 2 if rows > 1000 else 16
            routes[rows] = [
                torch.rand(rows, NUM_EXPERTS, generator=generator, device=DEVICE).topk(TOP_K).indices.to(torch.int32)
                for _ in range(graphs)
            ]
            xs[rows] = torch.randn(rows * expert_rows(outputs), inputs, device=DEVICE).to(torch.bfloat16)
            tiles_of = [group_rows(route, range(NUM_EXPERTS)) for route in routes[rows]]
            launches = [partial(grouped_gemm, xs[rows], plain, part) for part in tiles_of]
            self.measure(launches, layer=f"experts {name}", rows=rows, form="bfloat16")
        del plain
        for form_name, form in FORMS.items():
            stack = random_stack(form, NUM_EXPERTS, outputs, inputs)
            for rows in row_counts:
                usual = group_rows(routes[rows][0], range(NUM_EXPERTS), 8).tile_rows
                for tile_rows in {max(usual // 2, 8), usual, min(2 * usual, 128)} if rows > 1 else {8}:
                    row_tiles = [rows_in_tiles(route, NUM_EXPERTS, tile_rows) for route in routes[rows]]
                    used = sum(int(route.unique().numel()) for route in routes[rows]) / len(routes[rows])
                    for outputs_of_tile, *options in EXPERT_TILES[tile_rows]:
                        if not self.has_time():
                            return
                        tiles = Tiles(tile_rows, outputs_of_tile, 1, *options)
                        facts = {"layer": f"experts {name}", "rows": rows, "form": form_name, "tiles": list(tiles)}
                        facts["bytes"] = stack.bytes_read * used / NUM_EXPERTS
                        chosen = grouped.choose_tiles(usual, row_tiles[0].tokens is not None, torch.bfloat16)
                        facts["chosen"] = tiles == chosen
                        problem = self.problems.get(Task(True, form_name, tiles))
                        if problem:
                            self.cells.append({**facts, "problem": problem})
                            continue
                        launches = [
                            partial(grouped.grouped_product, xs[rows], stack, part, None, tiles) for part in row_tiles
                        ]
                        self.measure(launches, **facts)


def dequantized_product(x: Tensor, stack: FourBitExperts) -> Tensor:
    return F.linear(x, products.dequantize(stack, 0, x.dtype))


def copy_of(stack: FourBitExperts) -> FourBitExperts:
    experts, _, outputs, _ = stack.words.shape
    copy = FourBitExperts(experts, outputs, stack.inputs, stack.form, DEVICE, use_triton=True)
    for name in ("words", "scales", "zeros", "output_scales"):
        getattr(copy, name).copy_(getattr(stack, name))
    return copy


def tile_rows_of(rows: int) -> tuple[int, ...]:
    few = {1: (8,), 8: (8,), 16: (16, 8, 32), 32: (32,), 64: (64, 32), 128: (128, 64), 256: (128, 256, 64)}
    return few.get(rows, (128, 256))


def linear_tiles(rows: int, outputs: int, inputs: int) -> Iterator[Tiles | None]:
    """Return the ways to cut a product that are worth a measurement."""
    if rows >= 128:
        yield None
    for tile_rows in tile_rows_of(rows):
        for block_out, *options in LINEAR_TILES[tile_rows]:
            programs = -(-outputs // block_out) * -(-rows // tile_rows)
            for splits in SPLITS:
                fits = splits == 1 or (tile_rows <= MOST_SPLIT_ROWS and rows <= 256 and programs * splits <= 132 * 8)
                if fits and inputs // 64 // options[0] >= 2 * splits:
                    yield Tiles(tile_rows, block_out, splits, *options)


def tasks(row_counts: tuple[int, ...], forms: list[str]) -> Iterator[Task]:
    """Return the kernels of all cells."""
    wanted = {tile_rows for rows in row_counts for tile_rows in tile_rows_of(rows)}
    for form, tile_rows in itertools.product(forms, sorted(wanted)):
        for outputs, *options in LINEAR_TILES[tile_rows]:
            yield Task(False, form, Tiles(tile_rows, outputs, 1, *options))
    for form, (tile_rows, cuts) in itertools.product(forms, EXPERT_TILES.items()):
        for outputs, *options in cuts:
            yield Task(True, form, Tiles(tile_rows, outputs, 1, *options))


def summary(cells: list[dict[str, Any]]) -> list[str]:
    """Return a line per layer and rows: bfloat16's time, and each form's best and its time as it is chosen."""
    best = dict[tuple[str, int, str], dict[str, Any]]()
    chosen = {(cell["layer"], cell["rows"], cell["form"]): cell.get("us") for cell in cells if cell.get("chosen")}
    for cell in cells:
        key = cell["layer"], cell["rows"], cell["form"]
        if "us" in cell and (key not in best or cell["us"] < best[key]["us"]):
            best[key] = cell
    lines = ["layer          rows   bf16 us | form: us (% of 4.8 TB/s) tiles, as Tiles has them; us as chosen |"]
    for layer, rows in dict.fromkeys((cell["layer"], cell["rows"]) for cell in cells):
        line = f"{layer:<15}{rows:>4} {best.get((layer, rows, 'bfloat16'), {}).get('us', 0):>9} |"
        for form in FORMS:
            cell = best.get((layer, rows, form), {})
            if cell:
                share = cell["bytes"] / BYTES_PER_SECOND / (cell["us"] * 1e-6)
                tiles = "scratch" if cell["tiles"] is None else ",".join(map(str, cell["tiles"]))
                line += f" {form}: {cell['us']} ({share:.0%}) {tiles}; {chosen.get((layer, rows, form))} |"
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("four_bit_products"), help="folder of the results")
    parser.add_argument("--seconds", type=float, default=200.0, help="time for all, 20 to 3600")
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=list(FORMS), help="forms of the sweep")
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS), choices=ROWS, help="rows of the sweep")
    parser.add_argument("--check", action="store_true", help="check results only")
    parser.add_argument("--dependent-rows", type=int, default=1, help="most rows with dependent launch, 1 to 64")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="compilers, 1 to 64")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    deadline = begin + options.seconds
    problems = dict[Task, str]()
    row_counts = tuple(options.rows)
    use_dependent_launch(options.dependent_rows)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        options.processes, context, initializer=use_dependent_launch, initargs=(options.dependent_rows,)
    ) as pool:
        checks = {pool.submit(check_form, name): name for name in CHECKED}
        wanted = [] if options.check else tasks(row_counts, options.forms)
        compiled = {pool.submit(compile_task, task): task for task in wanted}
        wrong = list[str]()
        largest = dict[str, float]()
        for check, name in checks.items():
            try:
                largest[name], problems_of_form = check.result(timeout=max(1.0, deadline - time.monotonic()))
                wrong += problems_of_form
            except Exception:
                wrong.append(f"{name}: {traceback.format_exc()[-400:]}")
        print(f"checks took {time.monotonic() - begin:.0f} s; largest relative errors:")
        print(", ".join(f"{name} {error:.2e}" for name, error in largest.items()))
        print("\n".join(["WRONG", *wrong]) if wrong else "all products are right", flush=True)
        try:
            for done in as_completed(compiled, timeout=max(1.0, begin + 0.6 * options.seconds - time.monotonic())):
                problems[compiled[done]] = str(done.exception() or "") or done.result()
        except TimeoutError:
            print(f"time is up: {len(problems)} of {len(compiled)} kernels compiled")
        for task in compiled.values():
            problems.setdefault(task, "not compiled in time")
        for process in list(pool._processes.values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
    print(f"{sum(not problem for problem in problems.values())} kernels compiled, {time.monotonic() - begin:.0f} s")
    for problem in sorted({problem for problem in problems.values() if problem})[:5]:
        print(" ", problem)
    if not options.check:
        sweep = Sweep(deadline, problems)
        FORMS_OF_SWEEP = {name: FORMS[name] for name in options.forms}
        FORMS.clear()
        FORMS.update(FORMS_OF_SWEEP)
        few = tuple(rows for rows in row_counts if rows <= 256)
        many = tuple(rows for rows in row_counts if rows > 256)
        for group in filter(None, (few, many)):
            for name, shape in LINEARS.items():
                sweep.linear(name, shape, group)
            for name, shape in EXPERTS.items():
                sweep.experts(name, shape, group)
        results = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cells": sweep.cells,
            "wrong": wrong,
        }
        (options.out / "four_bit_products.json").write_text(json.dumps(results, indent=1))
        print(f"{len(sweep.cells)} cells, {time.monotonic() - begin:.0f} s")
        print("\n".join(summary(sweep.cells)))


if __name__ == "__main__":
    main()
