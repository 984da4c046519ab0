"""The Triton and FlashInfer backends on a GPU against plain torch in float32: sizes, dtypes, graphs, steps in flight.

FlashInfer compiles four kernels for these tests at its first run, each in up to a minute, and more for the slow ones.
On a machine that has only pytest:

    PYTHONPATH=.:tests/support pytest -c /dev/null --noconftest -m "not slow" tests/runner/test_attention_gpu.py
"""

from __future__ import annotations

import importlib.util
import random

import pytest
import torch
from attention_steps import Inputs, Shape, Side, assert_matches_reference, make_inputs
from torch import Tensor

from pdserve.kv.layout import KVScales

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(900),
]

needs_flashinfer = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="no flashinfer")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
TRITON = [
    pytest.param("triton", torch.float32, id="triton-float32"),
    pytest.param("triton", torch.bfloat16, id="triton-bfloat16"),
]
TRITON_HALF = pytest.param("triton", torch.float16, id="triton-float16")
FLASHINFER = pytest.param("flashinfer", torch.bfloat16, id="flashinfer-bfloat16", marks=needs_flashinfer)
FLASHINFER_HALF = pytest.param("flashinfer", torch.float16, id="flashinfer-float16", marks=needs_flashinfer)

FP8_SCALES = KVScales(0.02, 0.03)

SHAPES = {
    "llama-8b": Shape(heads=32, kv_heads=8, head_dim=128, page=64, num_pages=600),
    "qwen3-0.6b": Shape(heads=16, kv_heads=8, head_dim=128, page=16, has_norms=True, num_pages=600),
    "windows": Shape(heads=8, kv_heads=2, head_dim=128, page=16, windows=(None, 100, 1000), num_pages=600),
    "fp8": Shape(heads=32, kv_heads=8, head_dim=128, page=64, num_pages=600, scales=FP8_SCALES),
    "fp8-windows": Shape(
        heads=8,
        kv_heads=2,
        head_dim=128,
        page=16,
        has_norms=True,
        windows=(None, 100),
        num_pages=600,
        scales=FP8_SCALES,
    ),
}
OTHER_HEADS = {
    "multi-head-64": Shape(heads=8, kv_heads=8, head_dim=64, page=32, num_pages=600),
    "sevens-64": Shape(heads=14, kv_heads=2, head_dim=64, page=16, num_pages=600),
    "multi-query-256": Shape(heads=8, kv_heads=1, head_dim=256, page=32, num_pages=600),
}
TRITON_HEADS = {
    "threes-16": Shape(heads=6, kv_heads=2, head_dim=16, page=16, windows=(None, 50), num_pages=600),
    "eights-512": Shape(heads=16, kv_heads=2, head_dim=512, page=16, has_norms=True, num_pages=600),
    "threes-32": Shape(heads=6, kv_heads=2, head_dim=32, page=16, windows=(None, 50), num_pages=600),
}

STEPS = {
    "one": [(900, 1)],
    "first": [(0, 1)],
    "decodes": [(random.Random(row).randrange(300), 1) for row in range(40)],
    "long and short": [(2500, 1), *[(row, 1) for row in range(9)]],
    "prompt": [(0, 1500)],
    "large chunks": [(40, 1), (300, 1500), (0, 1100), (77, 40)],
    "one large chunk among small ones": [(130, 2000), *[(row, 3) for row in range(20)]],
    "a large chunk with many keys": [(2700, 1700)],
    "chunks": [(0, 5), (255, 333), (64, 64), (1000, 2)],
    "a few": [(3000, 2), (500, 3), (0, 4), (127, 2), (64, 16), (1500, 8), (300, 1)],
    "a few among many": [(2500, 3), *[(row * 7, 1) for row in range(30)], (900, 200)],
    "decodes before chunks": [(40, 1), (1029, 1), (0, 170), (100, 400)],
    "decodes between chunks": [(40, 1), (0, 170), (1029, 1), (100, 400), (0, 1)],
}


def make_side(name: str, inputs: Inputs) -> Side:
    return Side(name, inputs.shape, inputs.device, inputs.dtype, inputs.dtype)


def check(name: str, shape: Shape, step: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(shape, STEPS[step], "cuda", dtype)
    side = make_side(name, inputs)
    side.backend.plan(inputs.batch)
    assert_matches_reference(inputs, side.run(inputs), side.cache.tensor, TOLERANCE[dtype])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "dtype"), [*TRITON, TRITON_HALF, FLASHINFER])
def test_every_step_equals_the_reference(name: str, dtype: torch.dtype, shape: str, step: str) -> None:
    check(name, SHAPES[shape], step, dtype)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", OTHER_HEADS | TRITON_HEADS)
@pytest.mark.parametrize(("name", "dtype"), TRITON)
def test_other_head_shapes_equal_the_reference_with_triton(
    name: str, dtype: torch.dtype, shape: str, step: str
) -> None:
    check(name, (OTHER_HEADS | TRITON_HEADS)[shape], step, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", OTHER_HEADS)
@pytest.mark.parametrize(("name", "dtype"), [FLASHINFER, FLASHINFER_HALF])
def test_other_head_shapes_equal_the_reference_with_flashinfer(
    name: str, dtype: torch.dtype, shape: str, step: str
) -> None:
    check(name, OTHER_HEADS[shape], step, dtype)


def capture(side: Side, inputs: Inputs) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """Capture all layers; return the graph and the outputs it writes."""
    side.backend.plan(inputs.batch, graph=inputs.longest)
    side.run(inputs)  # compiles what has to be
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = side.run(inputs)
    return graph, outputs


@pytest.mark.parametrize("shape", ["llama-8b", "qwen3-0.6b", "windows", "fp8", "fp8-windows"])
@pytest.mark.parametrize(("name", "dtype"), [*TRITON, FLASHINFER])
def test_captured_graphs_are_exact_for_other_lengths(name: str, dtype: torch.dtype, shape: str) -> None:
    sizes = {rows: make_inputs(SHAPES[shape], [(5, 1)] * rows, "cuda", dtype) for rows in (40, 8, 1)}
    side = make_side(name, sizes[40])
    graphs = {rows: capture(side, inputs) for rows, inputs in sizes.items()}
    draw = random.Random(4)
    for seed, rows in enumerate((8, 1, 40, 8, 40, 1)):
        inputs = sizes[rows]
        longest = 150 if rows == 40 else (20, 800)[seed % 2]
        inputs.fill([(draw.randrange(longest), 1) for _ in range(draw.randrange(rows) + 1)], seed)
        side.reset()
        side.backend.plan(inputs.batch, graph=inputs.longest)
        graph, outputs = graphs[rows]
        graph.replay()
        assert_matches_reference(inputs, outputs, side.cache.tensor, TOLERANCE[dtype])


@pytest.mark.parametrize("shape", ["llama-8b", "qwen3-0.6b", "windows", "fp8", "fp8-windows"])
@pytest.mark.parametrize(("name", "dtype"), [*TRITON, FLASHINFER])
def test_captured_graphs_with_chunks_are_exact_for_other_lengths(name: str, dtype: torch.dtype, shape: str) -> None:
    small = make_inputs(SHAPES[shape], [(5, 25), *[(5, 1)] * 7], "cuda", dtype)
    large = make_inputs(SHAPES[shape], [(5, 400), *[(5, 1)] * 39], "cuda", dtype)
    side = make_side(name, large)
    captured = {inputs.tokens: capture(side, inputs) for inputs in (large, small)}
    steps = [
        (small, [(2500, 3)]),
        (small, [(17, 1), (800, 2), (0, 9), (300, 4)]),
        (large, [(40, 1), (1029, 1), (0, 170), (100, 200)]),
        (small, [(0, 32)]),
        (small, [(900, 1), (30, 1)]),
        (large, [(700, 439)]),
        (small, [(900, 1), (1200, 17)]),
        (large, [*[(row * 7, 1) for row in range(30)], (900, 2), (0, 150), (130, 3), (1000, 129)]),
    ]
    for seed, (inputs, step) in enumerate(steps):
        inputs.fill(step, seed)
        side.reset()
        side.backend.plan(inputs.batch, graph=inputs.longest)
        graph, outputs = captured[inputs.tokens]
        graph.replay()
        assert_matches_reference(inputs, outputs, side.cache.tensor, TOLERANCE[dtype])


@pytest.mark.parametrize(("name", "dtype"), [*TRITON, FLASHINFER])
def test_chunks_in_graphs_may_be_planned_before_earlier_ones_have_run(name: str, dtype: torch.dtype) -> None:
    shape = SHAPES["llama-8b"]
    draw = random.Random(6)
    size = [(5, 120), *[(5, 1)] * 8]
    inputs, *steps = (make_inputs(shape, size, "cuda", dtype) for _ in range(7))
    for seed, step in enumerate(steps):
        step.fill([(draw.randrange(600), draw.randrange(1, 40)) for _ in range(3)], seed)
    check_steps_in_flight(make_side(name, inputs), inputs, steps)


@pytest.mark.parametrize(("name", "dtype"), [*TRITON, FLASHINFER])
def test_steps_may_be_planned_before_earlier_ones_have_run(name: str, dtype: torch.dtype) -> None:
    shape = SHAPES["llama-8b"]
    steps = []
    for seed in range(6):
        lengths = random.Random(seed)
        steps.append(make_inputs(shape, [(lengths.randrange(800), 1) for _ in range(8)], "cuda", dtype, seed=seed))
    inputs = make_inputs(shape, [(5, 1)] * 8, "cuda", dtype)
    check_steps_in_flight(make_side(name, inputs), inputs, steps)


def check_steps_in_flight(side: Side, inputs: Inputs, steps: list[Inputs]) -> None:
    """Plan and replay ``steps`` of one size while the first one waits."""
    graph, outputs = capture(side, inputs)
    clones = []
    torch.cuda._sleep(1_000_000_000)  # half a second, in which the host gets ahead
    for step in steps:
        side.reset()
        inputs.take(step)
        side.backend.plan(inputs.batch, graph=inputs.longest)
        graph.replay()
        clones.append(([output.clone() for output in outputs], side.cache.tensor.clone()))
    for step, (results, cache) in zip(steps, clones, strict=True):
        assert_matches_reference(step, results, cache, TOLERANCE[step.dtype])


@pytest.mark.parametrize("step", ["decodes", "chunks"])
@pytest.mark.parametrize(("name", "dtype"), [TRITON[1], FLASHINFER])
def test_offsets_beyond_int32_are_exact(name: str, dtype: torch.dtype, step: str) -> None:
    shape = Shape(heads=8, kv_heads=8, head_dim=128, page=64, num_pages=35_000)  # 131,072 elements per page
    inputs = make_inputs(shape, STEPS[step], "cuda", dtype)
    assert int(inputs.batch.slots.max()) // 64 * 131_072 > 1 << 31
    side = make_side(name, inputs)
    side.backend.plan(inputs.batch)
    assert_matches_reference(inputs, side.run(inputs), side.cache.tensor, TOLERANCE[dtype])
