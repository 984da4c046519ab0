"""The Triton backend against plain torch: in Triton's interpreter, or on a GPU where there is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_steps import Shape, Side, assert_matches_reference, make_inputs
from fast_set import sampled
from torch import Tensor

from pdserve.kv.layout import KVScales

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SHAPES = {
    "alone": Shape(heads=2, kv_heads=2, head_dim=16, page=16),
    "pairs": Shape(heads=4, kv_heads=2, head_dim=32, page=32, has_norms=True),
    "fours": Shape(heads=4, kv_heads=1, head_dim=64, page=64),
    "windows": Shape(heads=2, kv_heads=1, head_dim=16, page=16, windows=(None, 20, 3)),
    "threes": Shape(heads=6, kv_heads=2, head_dim=16, page=16),
    "wide heads": Shape(heads=8, kv_heads=1, head_dim=512, page=16, has_norms=True),  # Gemma 4's full layers
}

# (tokens in the cache, new tokens) of each sequence
STEPS = {
    "one": [(0, 1)],
    "long": [(500, 1)],
    "decodes": [(15, 1), (16, 1), (0, 1), (63, 1), (64, 1), (130, 1)],
    "one long among short": [(3, 1), (700, 1), (0, 1), (40, 1), (17, 1), (300, 1)],
    "prompt": [(0, 70)],
    "chunks": [(0, 5), (31, 33), (64, 2)],
    "a few": [(600, 2), (62, 3), (0, 4), (15, 2), (700, 16), (130, 5), (300, 1)],
    "a few tokens alone": [(690, 3)],
    "mixed": [(40, 1), (0, 17), (129, 1), (100, 40), (0, 1)],
}


def check(
    shape: Shape, sequences: list[tuple[int, int]], dtype: torch.dtype, tolerance: float, padding: int
) -> list[Tensor]:
    inputs = make_inputs(shape, sequences, DEVICE, dtype, padding)
    compute = dtype if DEVICE == "cuda" else torch.float32
    side = Side("triton", shape, inputs.device, dtype, compute)
    side.backend.plan(inputs.batch)
    outputs = side.run(inputs)
    assert_matches_reference(inputs, outputs, side.cache.tensor, tolerance)
    return outputs


@pytest.mark.parametrize(("shape", "step"), sampled(SHAPES, STEPS, every=8))
def test_every_shape_and_step_equals_the_reference_in_float32(shape: str, step: str) -> None:
    check(SHAPES[shape], STEPS[step], torch.float32, 2e-5, padding=0)


def test_a_few_tokens_have_larger_tiles_beside_single_ones() -> None:
    """With eight heads per key head the tile of single tokens holds two tokens."""
    shape = Shape(heads=8, kv_heads=1, head_dim=16, page=16, windows=(None, 20))
    check(shape, [(600, 2), (62, 3), (0, 4), (15, 1), (130, 5), (300, 1)], torch.float32, 2e-5, padding=1)


@pytest.mark.parametrize("step", ["one", "decodes"])
def test_padded_rows_store_nothing_and_stay_finite(step: str) -> None:
    outputs = check(SHAPES["windows"], STEPS[step], torch.float32, 2e-5, padding=3)
    assert all(output.isfinite().all() for output in outputs)


def check_fp8(backend: str, shape: Shape, sequences: list[tuple[int, int]]) -> None:
    """Scales are no powers of two; scales of values are so small that many saturate."""
    shape = replace(shape, scales=KVScales(0.013, 0.0021))
    inputs = make_inputs(shape, sequences, DEVICE, torch.float32, padding=1)
    side = Side(backend, shape, inputs.device, torch.float32, torch.float32)
    side.backend.plan(inputs.batch)
    assert_matches_reference(inputs, side.run(inputs), side.cache.tensor, 2e-5)
    assert side.cache.tensor.float().abs().max() == 448


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_an_fp8_cache_equals_explicit_quantization(backend: str) -> None:
    check_fp8(backend, SHAPES["pairs"], [(20, 1), (3, 12)])


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_and_step_equals_explicit_quantization(shape: str, step: str) -> None:
    check_fp8("triton", SHAPES[shape], STEPS[step])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rotated_heads_are_stored_in_fp8(backend: str) -> None:
    shape = replace(SHAPES["pairs"], scales=KVScales(0.02, 0.03))
    inputs = make_inputs(shape, [(5, 9), (0, 1)], DEVICE, torch.float32)
    side = Side(backend, shape, inputs.device, torch.float32, torch.float32)
    k, v = (torch.randn(10, shape.kv_heads, shape.head_dim, device=DEVICE) for _ in range(2))
    side.backend.plan(inputs.batch)
    side.backend.store(0, k, v)
    pages = inputs.batch.slots // shape.page
    rows = inputs.batch.slots % shape.page
    for plane, (values, scale) in enumerate(((k, 0.02), (v, 0.03))):
        stored = side.cache.layers[0][pages, :, plane, rows]
        assert torch.equal(stored.float(), (values / scale).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_a_16_bit_cache_equals_the_reference(dtype: torch.dtype) -> None:
    check(SHAPES["pairs"], STEPS["mixed"], dtype, 2e-2, padding=0)
