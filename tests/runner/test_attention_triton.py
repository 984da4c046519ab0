"""The Triton backend against plain torch: in Triton's interpreter, or on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch
from attention_steps import Shape, Side, assert_matches_reference, make_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SHAPES = {
    "alone": Shape(heads=2, kv_heads=2, head_dim=16, page=16),
    "pairs": Shape(heads=4, kv_heads=2, head_dim=32, page=32, has_norms=True),
    "fours": Shape(heads=4, kv_heads=1, head_dim=64, page=64),
    "threes": Shape(heads=6, kv_heads=2, head_dim=16, page=16),
    "windows": Shape(heads=2, kv_heads=1, head_dim=16, page=16, windows=(None, 20, 3)),
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


def check(shape: Shape, sequences: list[tuple[int, int]], dtype: torch.dtype, tolerance: float, padding: int) -> None:
    inputs = make_inputs(shape, sequences, DEVICE, dtype, padding)
    compute = dtype if DEVICE == "cuda" else torch.float32
    side = Side("triton", shape, inputs.device, dtype, compute)
    side.backend.plan(inputs.batch)
    assert_matches_reference(inputs, side.run(inputs), side.cache.tensor, tolerance)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_and_step_equals_the_reference_in_float32(shape: str, step: str) -> None:
    check(SHAPES[shape], STEPS[step], torch.float32, 2e-5, padding=0)


@pytest.mark.parametrize("step", ["one", "decodes"])
def test_padded_rows_store_nothing_and_stay_finite(step: str) -> None:
    check(SHAPES["windows"], STEPS[step], torch.float32, 2e-5, padding=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_cache_equals_the_reference(dtype: torch.dtype) -> None:
    check(SHAPES["pairs"], STEPS["mixed"], dtype, 2e-2, padding=0)
