"""Every Triton kernel against plain torch: in Triton's interpreter, or on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch
from attention_steps import Shape, make_inputs
from torch import Tensor

from pdserve.config.node_config import DeviceInfo
from pdserve.config.parallel import ParallelConfig
from pdserve.kv.layout import UNSCALED, KVScales
from runner.batch import HeadNorms, Quantized, RotaryCosSin
from runner.distributed.parallel_state import ParallelState
from runner.kernels.attention.pages import PageLists
from runner.kernels.attention.rope_store import rope_store
from runner.kernels.embedding import embed
from runner.kernels.gather import TILE, GatheredKeys
from runner.kernels.products.fp8_products import quantize
from runner.kernels.products.gemv import gemv
from runner.kernels.reference import apply_rotary, expand_cos_sin, rms_norm
from runner.kv_cache import KVCache
from runner.models.layers.pointwise_ops import PointwiseOps
from runner.models.layers.triton_ops import TritonPointwiseOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALONE = ParallelState(ParallelConfig(stage_layers=(1,)).position(0), DeviceInfo(DEVICE.type, 0, "", 0), "")
EPS = 1e-5
# Kernels round once, torch after every operation.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}

dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda dtype: str(dtype).removeprefix("torch."))


def random(*size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def reference_ops() -> PointwiseOps:
    return PointwiseOps(EPS, ALONE)


@dtypes
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (5, 100), (3, 1536)])
def test_rms_norm_equals_torch(rows: int, size: int, dtype: torch.dtype) -> None:
    x = random(rows, size, dtype=dtype)
    weight = random(size, dtype=dtype, seed=1)
    assert_close(TritonPointwiseOps(EPS, ALONE).rms_norm(x, weight), reference_ops().rms_norm(x, weight))


@dtypes
def test_add_rms_norm_updates_the_residual(dtype: torch.dtype) -> None:
    x, residual, weight = (random(3, 200, dtype=dtype, seed=seed) for seed in range(3))
    weight = weight[0].contiguous()
    expected = residual.clone()
    normed = reference_ops().add_rms_norm(x, expected, weight)
    assert_close(TritonPointwiseOps(EPS, ALONE).add_rms_norm(x, residual, weight), normed)
    assert_close(residual, expected)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("size", "group"), [(384, 128), (384, 384), (200, 200)])
def test_a_quantized_norm_equals_the_norm_quantized_behind_it(size: int, group: int, with_residual: bool) -> None:
    ops = TritonPointwiseOps(EPS, ALONE)
    dtype = torch.bfloat16
    x = random(3, size, dtype=dtype)
    residual = random(3, size, dtype=dtype, seed=1)
    weight = random(size, dtype=dtype)
    x[1] = residual[1] = 0
    other = residual.clone()
    if with_residual:
        expected = quantize(ops.add_rms_norm(x, other, weight), group)
        quantized = ops.quantized_rms_norm(x, residual, weight, group)
        assert torch.equal(residual, other)
    else:
        expected = quantize(ops.rms_norm(x, weight), group)
        quantized = ops.quantized_rms_norm(x, None, weight, group)
    assert isinstance(quantized, Quantized)
    assert torch.equal(quantized.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(quantized.scales, expected.scales)


def test_the_norm_of_a_row_does_not_depend_on_other_rows() -> None:
    x = random(4, 96, dtype=torch.bfloat16)
    weight = random(96, dtype=torch.bfloat16, seed=1)
    together = TritonPointwiseOps(EPS, ALONE).rms_norm(x, weight)
    assert torch.equal(together[2:3], TritonPointwiseOps(EPS, ALONE).rms_norm(x[2:3].clone(), weight))


@dtypes
@pytest.mark.parametrize("size", [32, 1024, 1500])
def test_silu_and_mul_equals_torch(size: int, dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * size, dtype=dtype) * 4
    assert_close(TritonPointwiseOps(EPS, ALONE).silu_and_mul(gate_up), reference_ops().silu_and_mul(gate_up))


@dtypes
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 8), (7, 1000), (130, 1024), (64, 3584)])
def test_gemv_equals_the_exact_product(out_features: int, in_features: int, dtype: torch.dtype) -> None:
    x = random(1, in_features, dtype=dtype)
    weight = random(out_features, in_features, dtype=dtype, seed=1)
    exact = x.double() @ weight.double().t()
    error = (gemv(x, weight).double() - exact).abs().max()
    assert error <= TOLERANCE[dtype] * exact.abs().max().clamp(min=1.0)


@dtypes
def test_embed_yields_zeros_outside_of_the_shard(dtype: torch.dtype) -> None:
    table = random(12, 1500, dtype=dtype)
    ids = torch.tensor([0, 5, 6, 15, 16, 99, 6], device=DEVICE)
    expected = torch.zeros(len(ids), 1500, dtype=torch.float32, device=DEVICE)
    for row, token in enumerate(ids.tolist()):
        if 6 <= token < 16:
            expected[row] = table[token - 6].float()
    assert torch.equal(embed(ids, table, 6, 10, torch.float32), expected)


@dtypes
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "page"), [(4, 4, 16, 16), (6, 2, 64, 32), (40, 10, 32, 64)])
def test_rope_store_equals_torch(
    heads: int, kv_heads: int, head_dim: int, page: int, has_norms: bool, dtype: torch.dtype
) -> None:
    slots = torch.tensor([3 * page, -1, 5 * page - 1, 1, -1], device=DEVICE)
    qkv = random(len(slots), (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    angles = random(len(slots), head_dim, dtype=torch.float32, seed=1)  # rows of a rotary table: cos, then sin
    rotary = RotaryCosSin(*angles.chunk(2, dim=1))
    weights = random(2, head_dim, dtype=dtype, seed=2)
    norms = HeadNorms(weights[0], weights[1], EPS) if has_norms else None
    pages = random(6, kv_heads, 3, 2, page, head_dim, dtype=dtype, seed=3)  # dimension 2: layers
    expected_pages = pages.clone()

    q = rope_store(qkv, heads, rotary, norms, slots, pages[:, :, 1])

    expected, k, v = torch.split(qkv.view(len(slots), -1, head_dim), [heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        eps = torch.tensor(EPS, device=DEVICE)
        expected = rms_norm(expected, norms.q_weight, eps)
        k = rms_norm(k, norms.k_weight, eps)
    cos, sin = expand_cos_sin(rotary, dtype)
    expected = apply_rotary(expected, cos, sin)
    k = apply_rotary(k, cos, sin)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected_pages[slot // page, :, 1, 0, slot % page] = k[token]
            expected_pages[slot // page, :, 1, 1, slot % page] = v[token]
    scale = 4 if has_norms else 1  # values are larger when they are rounded, before rotation
    torch.testing.assert_close(q, expected, atol=scale * TOLERANCE[dtype], rtol=scale * TOLERANCE[dtype])
    torch.testing.assert_close(pages, expected_pages, atol=scale * TOLERANCE[dtype], rtol=scale * TOLERANCE[dtype])


def test_page_lists_hold_the_pages_of_all_sequences() -> None:
    sequences = [(16, 1), (0, 16), (100, 8)]
    inputs = make_inputs(Shape(page=16), sequences, str(DEVICE), torch.float32, padding=2)
    lists = PageLists(8, 16, DEVICE)
    lists.build(inputs.batch, longest=108)
    counts = [2, 1, 7, 1, 1]
    expected = [inputs.batch.page_table[row, :count].tolist() for row, count in enumerate(counts[:3])]
    assert lists.starts[:6].tolist() == [0, 2, 3, 10, 11, 12]
    assert lists.last_lens[:5].tolist() == [1, 16, 12, 1, 1]
    assert lists.pages[:12].tolist() == [page for pages in expected for page in pages] + [0, 0]


def test_page_lists_of_many_rows_and_long_sequences() -> None:
    rows = 300  # more than a program adds up at once
    shape = Shape(page=16, num_pages=1030, kv_heads=1, head_dim=16)
    inputs = make_inputs(shape, [(0, 1)] * 2 + [(16 * 1025, 1)], str(DEVICE), torch.float32, padding=rows - 3)
    lists = PageLists(rows, 16, DEVICE)
    lists.build(inputs.batch, longest=16 * 1025 + 1)
    assert lists.starts.tolist() == [0, 1, 2, *range(2 + 1026, 2 + 1026 + rows - 2)]
    assert lists.pages[2 : 2 + 1026].tolist() == inputs.batch.page_table[2, :1026].tolist()


@pytest.mark.parametrize(("page", "scales"), [(16, None), (64, None), (16, KVScales(0.02, 0.3))])
def test_gathered_keys_are_contiguous_and_zero_padded(page: int, scales: KVScales | None) -> None:
    shape = Shape(page=page, kv_heads=2, head_dim=16, windows=(None, None), num_pages=60, scales=scales)
    lens = [TILE + 5, 0, 3 * TILE, 1, 40]
    inputs = make_inputs(shape, [(length, 0) for length in lens], str(DEVICE), torch.float32)
    cache = KVCache(shape.layout(torch.float32), DEVICE)
    cache.tensor.fill_(torch.nan)  # unwritten slots must not be read
    layer = cache.layers[1]
    expected: list[tuple[Tensor, Tensor]] = []
    for row, length in enumerate(lens):
        k, v = (random(length, 2, 16, dtype=torch.float32, seed=2 * row + kv) for kv in range(2))
        if scales is not None:
            k = k.to(torch.float8_e4m3fn)
            v = v.to(torch.float8_e4m3fn)
        for token in range(length):
            at = int(inputs.batch.page_table[row, token // page])
            layer[at, :, 0, token % page] = k[token]
            layer[at, :, 1, token % page] = v[token]
        expected.append((k, v) if scales is None else (k.float() * scales.k, v.float() * scales.v))
    gathered = GatheredKeys(1000, 2, 16, torch.float32, DEVICE)
    starts = gathered.plan(inputs.batch, 0)
    assert starts.tolist() == [0, 2 * TILE, 2 * TILE, 5 * TILE, 6 * TILE, 7 * TILE]
    for _ in range(2):  # results of an earlier call must not matter
        for side, tensor in enumerate(gathered.gather(layer, scales or UNSCALED)):
            wanted = torch.zeros(7 * TILE, 2, 16, device=DEVICE)
            for start, tokens in zip(starts, expected, strict=False):
                wanted[start : start + len(tokens[side])] = tokens[side]
            assert torch.equal(tensor, wanted)
            tensor.fill_(torch.nan)
