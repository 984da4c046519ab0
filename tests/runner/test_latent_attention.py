"""Attention to latents: every back end against plain torch in float32, and plain torch against the published formula.

On a machine that has only pytest, and a GPU:

    PYTHONPATH=.:tests/support pytest -c /dev/null --noconftest tests/runner/test_latent_attention.py
"""

from __future__ import annotations

import importlib.util
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_steps import Inputs, Shape, Side, assert_matches_reference, make_inputs, reference
from fast_set import sampled
from torch import Tensor

from pdserve.model.latent import LatentConfig
from runner.kernels.attention.latents import gather_latents
from runner.kernels.reference import rms_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_FLASHINFER = importlib.util.find_spec("flashinfer") is not None
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}

pytestmark = pytest.mark.timeout(900)  # FlashInfer may compile


def latent(rank: int, nope: int, rope: int, values: int) -> LatentConfig:
    return LatentConfig(
        kv_lora_rank=rank,
        q_lora_rank=0,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=values,
        rope_interleave=False,
    )


SMALL = {  # the slowest first, because the fast set has it in small steps then
    "two groups of ten": Shape(heads=20, page=32, windows=(None, None), latent=latent(16, 8, 32, 16)),
    "four heads": Shape(heads=4, page=16, latent=latent(32, 24, 16, 40)),
    "one head": Shape(heads=1, page=16, latent=latent(64, 16, 16, 8)),
}
PUBLISHED = {
    "v2-lite": Shape(heads=16, page=64, windows=(None, None), num_pages=400, latent=latent(512, 128, 64, 128)),
    "v3": Shape(heads=128, page=32, num_pages=400, latent=latent(512, 128, 64, 128)),
    "glm-4.7-flash": Shape(heads=20, page=16, num_pages=600, latent=latent(512, 192, 64, 256)),
}
# (tokens in the cache, new tokens) of each sequence
STEPS = {
    "one": [(0, 1)],
    "decodes": [(15, 1), (16, 1), (0, 1), (63, 1), (130, 1)],
    "prompt": [(0, 70)],
    "chunks": [(0, 5), (31, 33), (64, 2)],
    "a few": [(300, 2), (62, 3), (0, 4), (130, 5), (30, 1)],
    "mixed": [(40, 1), (0, 17), (129, 1), (100, 40), (0, 1)],
}
LARGE_STEPS: dict[str, list[tuple[int, int]]] = {
    **STEPS,
    "many decodes": [(random.Random(row).randrange(300), 1) for row in range(40)],
    "long and short": [(2500, 1), *[(row, 1) for row in range(9)]],
    "a long prompt": [(0, 1500)],
    "large chunks": [(40, 1), (300, 1500), (0, 1100), (77, 40)],
    "a large chunk with many keys": [(2300, 1700)],
    "decodes between chunks": [(40, 1), (0, 170), (1029, 1), (100, 400), (0, 1)],
}


def check(name: str, shape: Shape, sequences: list[tuple[int, int]], dtype: torch.dtype, padding: int = 0) -> None:
    inputs = make_inputs(shape, sequences, DEVICE, dtype, padding)
    side = Side(name, shape, inputs.device, dtype, dtype if DEVICE == "cuda" else torch.float32)
    side.backend.plan(inputs.batch)
    assert_matches_reference(inputs, side.run(inputs), side.cache.tensor, TOLERANCE[dtype])


@pytest.mark.parametrize(("shape", "step"), sampled(SMALL, STEPS, every=6))
def test_triton_equals_plain_torch(shape: str, step: str) -> None:
    check("triton", SMALL[shape], STEPS[step], torch.float32)


def test_a_few_tokens_have_larger_tiles_beside_single_ones() -> None:
    """In 16 bits, where a tile of single tokens is full of heads."""
    shape = SMALL["two groups of ten"]
    inputs = make_inputs(shape, STEPS["a few"], DEVICE, torch.float16)
    side = Side("triton", shape, inputs.device, torch.float16, torch.float16)
    side.backend.plan(inputs.batch)
    assert_matches_reference(inputs, side.run(inputs), side.cache.tensor, TOLERANCE[torch.float16])


def test_padded_rows_store_nothing_and_stay_finite() -> None:
    check("triton", SMALL["four heads"], STEPS["decodes"], torch.float32, padding=3)


def test_plain_torch_equals_attention_to_expanded_keys() -> None:
    """Softmax over the scores of whole keys, head by head, of one prompt."""
    shape = SMALL["four heads"]
    inputs = make_inputs(shape, [(0, 40)], "cpu", torch.float32)
    (output,), cache = reference(inputs)
    sizes = shape.latent
    assert sizes is not None
    side = Side("torch", shape, inputs.device, torch.float32, torch.float32)
    assert side.latent is not None
    weight = side.latent.weight
    norm = side.latent.norm
    q, rows = inputs.qkv[0].split([shape.heads * sizes.qk_head_dim, sizes.row_size], dim=1)
    latents = rms_norm(rows[:, : sizes.kv_lora_rank], norm.weight, torch.tensor(norm.eps))
    k_rope = rotated(rows[:, None, sizes.kv_lora_rank :], inputs)
    q = q.view(40, shape.heads, -1)
    q = torch.cat((q[:, :, : sizes.qk_nope_head_dim], rotated(q[:, :, sizes.qk_nope_head_dim :], inputs)), dim=2)
    both = (latents @ weight.t()).view(40, shape.heads, -1)
    keys = torch.cat((both[:, :, : sizes.qk_nope_head_dim], k_rope.expand(-1, shape.heads, -1)), dim=2)
    q, keys, values = (tensor.transpose(0, 1) for tensor in (q, keys, both[:, :, sizes.qk_nope_head_dim :]))
    expected = F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=shape.specs()[0].scale)
    torch.testing.assert_close(output, expected.transpose(0, 1).flatten(1), atol=1e-5, rtol=1e-5)
    pages = inputs.batch.slots // shape.page
    offsets = inputs.batch.slots % shape.page
    torch.testing.assert_close(cache[pages, 0, 0, 0, offsets], torch.cat((latents, k_rope[:, 0]), dim=1))


def rotated(x: Tensor, inputs: Inputs) -> Tensor:
    cos = inputs.rotary.cos[:, None]
    sin = inputs.rotary.sin[:, None]
    left, right = x.chunk(2, dim=2)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=2)


def test_rows_are_gathered_to_where_whole_tiles_begin() -> None:
    shape = SMALL["two groups of ten"]
    lengths = [5, 130, 128]
    inputs = make_inputs(shape, [(length - 1, 1) for length in lengths], DEVICE, torch.float32)
    side = Side("torch", shape, inputs.device, torch.float32, torch.float32)
    sizes = shape.latent
    total = 128 + 256 + 128
    assert sizes is not None
    latents = torch.full((total, sizes.kv_lora_rank), 7.0, device=DEVICE)
    keys = torch.full((total, shape.heads, sizes.qk_head_dim), 7.0, device=DEVICE)
    gather_latents(side.cache.layers[1], inputs.batch, max(lengths), latents, keys, 128)
    assert (keys[:, :, : sizes.qk_nope_head_dim] == 7).all()
    for row, (start, length, end) in enumerate(zip((0, 128, 384), lengths, (128, 384, 512), strict=True)):
        pages = inputs.batch.page_table[row, : -(-length // shape.page)].long()
        rows = side.cache.layers[1][pages, 0, 0].flatten(0, 1)[:length]
        assert torch.equal(latents[start : start + length], rows[:, : sizes.kv_lora_rank])
        rope = rows[:, None, sizes.kv_lora_rank :].expand(-1, shape.heads, -1)
        assert torch.equal(keys[start : start + length, :, sizes.qk_nope_head_dim :], rope)
        assert (latents[start + length : end] == 0).all()
        assert (keys[start + length : end, :, sizes.qk_nope_head_dim :] == 0).all()


# ------------------------------------------------------------ on GPUs

HALF = [(name, dtype) for name in ("triton", "flashinfer") for dtype in (torch.bfloat16, torch.float16)]


def needs_a_gpu(name: str) -> None:
    if DEVICE == "cpu":
        pytest.skip("no CUDA device")
    if name == "flashinfer" and not HAS_FLASHINFER:
        pytest.skip("no flashinfer")


@pytest.mark.gpu
@pytest.mark.parametrize("step", LARGE_STEPS)
@pytest.mark.parametrize("shape", PUBLISHED)
@pytest.mark.parametrize(("name", "dtype"), [HALF[0], HALF[2]])
def test_published_sizes_equal_plain_torch(name: str, dtype: torch.dtype, shape: str, step: str) -> None:
    needs_a_gpu(name)
    check(name, PUBLISHED[shape], LARGE_STEPS[step], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("step", ["mixed", "large chunks", "many decodes"])
@pytest.mark.parametrize(("name", "dtype"), [HALF[1], HALF[3]])
def test_float16_equals_plain_torch(name: str, dtype: torch.dtype, step: str) -> None:
    needs_a_gpu(name)
    check(name, PUBLISHED["v2-lite"], LARGE_STEPS[step], dtype)


@pytest.mark.gpu
def test_only_long_chunks_are_expanded() -> None:
    needs_a_gpu("flashinfer")
    shape = PUBLISHED["v2-lite"]
    side: Any = None
    for step, first in (("large chunks", 1), ("a long prompt", 0), ("many decodes", None), ("a few", None)):
        inputs = make_inputs(shape, LARGE_STEPS[step], "cuda", torch.bfloat16)
        side = side or Side("flashinfer", shape, inputs.device, torch.bfloat16, torch.bfloat16)
        side.backend.plan(inputs.batch)
        assert side.backend.first_expanded == first


def capture(side: Side, inputs: Inputs) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """Capture all layers; return the graph and the outputs it writes."""
    side.backend.plan(inputs.batch, graph=inputs.longest)
    side.run(inputs)  # compiles what has to be
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = side.run(inputs)
    return graph, outputs


@pytest.mark.gpu
@pytest.mark.parametrize("shape", PUBLISHED)
@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_captured_graphs_are_exact_for_other_lengths(name: str, shape: str) -> None:
    needs_a_gpu(name)
    sizes = {rows: make_inputs(PUBLISHED[shape], [(5, 1)] * rows, "cuda", torch.bfloat16) for rows in (40, 8, 1)}
    side = Side(name, PUBLISHED[shape], torch.device("cuda"), torch.bfloat16, torch.bfloat16)
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
        assert_matches_reference(inputs, outputs, side.cache.tensor, TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_captured_graphs_with_chunks_are_exact_for_other_lengths(name: str) -> None:
    needs_a_gpu(name)
    inputs = make_inputs(PUBLISHED["v2-lite"], [(5, 25), *[(5, 1)] * 7], "cuda", torch.bfloat16)
    side = Side(name, inputs.shape, inputs.device, torch.bfloat16, torch.bfloat16)
    graph, outputs = capture(side, inputs)
    steps = [[(2500, 3)], [(17, 1), (800, 2), (0, 9), (300, 4)], [(0, 32)], [(900, 1), (1200, 17)]]
    for seed, step in enumerate(steps):
        inputs.fill(step, seed)
        side.reset()
        side.backend.plan(inputs.batch, graph=inputs.longest)
        graph.replay()
        assert_matches_reference(inputs, outputs, side.cache.tensor, TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_steps_may_be_planned_before_earlier_ones_have_run(name: str) -> None:
    """This includes steps whose keys are expanded into the memory of the step before."""
    needs_a_gpu(name)
    shape = PUBLISHED["v2-lite"]
    side = Side(name, shape, torch.device("cuda"), torch.bfloat16, torch.bfloat16)
    names = ("large chunks", "a long prompt", "many decodes", "decodes between chunks", "large chunks")
    steps = [
        make_inputs(shape, LARGE_STEPS[step], "cuda", torch.bfloat16, seed=seed) for seed, step in enumerate(names)
    ]
    for inputs in steps:
        side.backend.plan(inputs.batch)
        side.run(inputs)  # compiles what has to be
    results = []
    torch.cuda._sleep(1_000_000_000)  # half a second, in which the host gets ahead
    for inputs in steps:
        side.reset()
        side.backend.plan(inputs.batch)
        results.append((side.run(inputs), side.cache.tensor.clone()))
    for inputs, (outputs, cache) in zip(steps, results, strict=True):
        assert_matches_reference(inputs, outputs, cache, TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("step", ["many decodes", "large chunks"])
@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_offsets_beyond_int32_are_exact(name: str, step: str) -> None:
    needs_a_gpu(name)
    shape = replace(PUBLISHED["v2-lite"], num_pages=35_000)  # 2 * 64 * 576 elements per page
    inputs = make_inputs(shape, LARGE_STEPS[step], "cuda", torch.bfloat16)
    assert int(inputs.batch.slots.max()) // 64 * 73_728 > 1 << 31
    side = Side(name, shape, inputs.device, torch.bfloat16, torch.bfloat16)
    side.backend.plan(inputs.batch)
    assert_matches_reference(inputs, side.run(inputs), side.cache.tensor, TOLERANCE[torch.bfloat16])
