"""Products of FP8 weights (E4M3), and activations quantized for them.

A weight has scales [out_features / ROW_BLOCK, in_features / GROUP]: per output (ROW_BLOCK 1, GROUP all inputs), or per
block of 128 x 128. Activations have scales [tokens, in_features / GROUP], chosen from their largest values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.batch import Quantized
from runner.kernels.activation import silu_and_mul_values
from runner.kernels.dependent_launch import pdl_options, wait_for_predecessor
from runner.kernels.products.fp8 import quantized_rows, rounded_to

_QUANTIZED = 2048  # values that a program quantizes; a larger group is one program's
_ROWS = 4  # rows of a weight per program of ``gemv``
_CHUNK = 2048  # values of a row that a program of ``gemv`` reads at a time
_PART = tl.constexpr(16)  # values of a row that a thread reads at once, and sums by itself


@triton.jit
def _quantize_kernel(
    x,  # [tokens, IN], or gates and ups [tokens, 2 * IN] if GATED
    values,  # out [tokens, IN]
    scales,  # out [groups]
    groups,  # number of groups of all tokens
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,  # at least GROUP
    GROUPS: tl.constexpr,
):
    """Grid (blocks of GROUPS groups)."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    column = tl.arange(0, BLOCK)
    inside = (group < groups)[:, None] & (column < GROUP)[None, :]
    at = group[:, None] * GROUP + column[None, :]
    if GATED:
        from_gate = at + (group // (IN // GROUP))[:, None] * IN
        gate = tl.load(x + from_gate, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + from_gate + IN, mask=inside, other=0.0).to(tl.float32)
        # Rounded as silu_and_mul rounds it.
        part = rounded_to(silu_and_mul_values(gate, up), x.dtype.element_ty)
    else:
        part = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    quantized, scale = quantized_rows(part)
    tl.store(scales + group, scale, mask=group < groups)
    tl.store(values + at, quantized, mask=inside)


def quantize(x: Tensor, group: int, *, gated: bool = False) -> Quantized:
    """Quantize x [tokens, size], or if ``gated`` silu(gate) * up of x [tokens, 2 * size], in groups of a row."""
    assert x.is_contiguous()
    tokens = x.shape[0]
    size = x.shape[1] // 2 if gated else x.shape[1]
    values = torch.empty(tokens, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(tokens, size // group, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(group)
    count = scales.numel()
    together = max(1, min(_QUANTIZED // block, triton.next_power_of_2(size // group)))
    if count:
        _quantize_kernel[(triton.cdiv(count, together),)](
            x,
            values,
            scales,
            count,
            IN=size,
            GROUP=group,
            GATED=gated,
            BLOCK=block,
            GROUPS=together,
            num_warps=max(1, min(32, block * together // 512)),
        )
    return Quantized(values, scales)


@triton.jit
def _partial_sums(
    weights,  # [ROWS, CHUNK] from input ``begin`` on
    x,
    scales,
    begin,
    row,
    row_mask,
    IN: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the sums over every _PART inputs, scaled unless a row is one group: [ROWS, CHUNK / _PART]."""
    column = begin + tl.arange(0, CHUNK)
    values = tl.load(x + column, mask=column < IN, other=0.0).to(tl.float32)
    product = weights.to(tl.float32) * values[None, :]
    sums = tl.sum(tl.reshape(product, (ROWS, CHUNK // _PART, _PART)), axis=2)
    if GROUP < IN:
        group = (begin + tl.arange(0, CHUNK // _PART) * _PART) // GROUP
        groups = (IN + GROUP - 1) // GROUP
        held = row_mask[:, None] & (group < groups)[None, :]
        at = (row // ROW_BLOCK)[:, None] * groups + group[None, :]
        sums *= tl.load(scales + at, mask=held, other=0.0)
    return sums


@triton.jit
def _gemv_kernel(
    x,
    weight,
    scales,
    y,
    out_features,
    IN: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,  # inputs with one scale; IN: the scale is applied to the sum
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[n] = sum over k of weight[n, k] * scale[n, k] * x[k], in float32. A program per ROWS outputs."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = row < out_features
    column = tl.arange(0, CHUNK)
    at = weight + row[:, None].to(tl.int64) * IN + column[None, :]
    mask = row_mask[:, None] & (column < IN)[None, :]
    weights = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_predecessor(PDL)
    sums = _partial_sums(weights, x, scales, 0, row, row_mask, IN, ROW_BLOCK, GROUP, ROWS, CHUNK)
    for begin in range(CHUNK, IN, CHUNK):
        mask = row_mask[:, None] & (begin + column < IN)[None, :]
        weights = tl.load(at + begin, mask=mask, other=0.0, eviction_policy="evict_first")
        sums += _partial_sums(weights, x, scales, begin, row, row_mask, IN, ROW_BLOCK, GROUP, ROWS, CHUNK)
    result = tl.sum(sums, axis=1)
    if GROUP == IN:
        result *= tl.load(scales + row // ROW_BLOCK, mask=row_mask, other=0.0)
    tl.store(y + row, result.to(y.dtype.element_ty), mask=row_mask)


def gemv(x: Tensor, weight: Tensor, scales: Tensor, row_block: int, group: int) -> Tensor:
    """Return x Wᵀ [1, out_features] of x [1, in_features]; a ``group`` is all inputs or a multiple of 16."""
    out_features, in_features = weight.shape
    y = torch.empty(1, out_features, dtype=x.dtype, device=x.device)
    _gemv_kernel[(triton.cdiv(out_features, _ROWS),)](
        x,
        weight,
        scales,
        y,
        out_features,
        IN=in_features,
        ROW_BLOCK=row_block,
        GROUP=group,
        ROWS=_ROWS,
        CHUNK=_CHUNK,
        num_warps=4,
        **pdl_options(y),
    )
    return y


@triton.jit(do_not_specialize=["tokens"])
def _block_matmul_kernel(
    x,  # [tokens, IN] E4M3
    x_scales,  # [tokens, IN / GROUP] float32
    weight,  # [OUT, IN] E4M3
    scales,  # [OUT / ROW_BLOCK, IN / GROUP] float32
    y,  # [tokens, OUT]
    tokens,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    TOGETHER: tl.constexpr,  # tiles of tokens whose programs run together, so that they share weights in cache
):
    """Grid (tiles). The sum of each group is scaled in float32."""
    tile = tl.program_id(0)
    across = tl.cdiv(OUT, BLOCK_OUT)
    down = tl.cdiv(tokens, BLOCK_TOKENS)
    first = tile // (TOGETHER * across) * TOGETHER
    height = tl.minimum(down - first, TOGETHER)
    rows = ((first + tile % (TOGETHER * across) % height) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    columns = tile % (TOGETHER * across) // height * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inner = tl.arange(0, GROUP)
    row_mask = rows < tokens
    held = columns < OUT
    at_x = x + rows[:, None] * IN + inner[None, :]
    at_weight = weight + columns[None, :].to(tl.int64) * IN + inner[:, None]
    at_x_scales = x_scales + rows * (IN // GROUP)
    at_scales = scales + columns // ROW_BLOCK * (IN // GROUP)
    total = tl.zeros((BLOCK_TOKENS, BLOCK_OUT), tl.float32)
    for group in range(IN // GROUP):
        a = tl.load(at_x + group * GROUP, mask=row_mask[:, None], other=0.0)
        b = tl.load(at_weight + group * GROUP, mask=held[None, :], other=0.0)
        a_scale = tl.load(at_x_scales + group, mask=row_mask, other=0.0)
        b_scale = tl.load(at_scales + group, mask=held, other=0.0)
        total += tl.dot(a, b) * a_scale[:, None] * b_scale[None, :]
    place = y + rows[:, None] * OUT + columns[None, :]
    tl.store(place, total.to(y.dtype.element_ty), mask=row_mask[:, None] & held[None, :])


def block_matmul(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, row_block: int, group: int) -> Tensor:
    """Return bfloat16 [tokens, out_features] of quantized x [tokens, in_features] with the same groups."""
    tokens = x.shape[0]
    out_features, in_features = weight.shape
    if tokens <= 32:  # the time to read the weight: enough programs for all processors
        block_tokens = 16 if tokens <= 16 else 32
        block_out = 32
        warps = 4
        stages = 5
    elif tokens <= 64:
        block_tokens = 64
        block_out = 64
        warps = 4
        stages = 4
    else:
        block_tokens = 128
        block_out = 128
        warps = 8
        stages = 3
    y = torch.empty(tokens, out_features, dtype=torch.bfloat16, device=x.device)
    _block_matmul_kernel[(triton.cdiv(tokens, block_tokens) * triton.cdiv(out_features, block_out),)](
        x,
        x_scales,
        weight,
        scales,
        y,
        tokens,
        OUT=out_features,
        IN=in_features,
        ROW_BLOCK=row_block,
        GROUP=group,
        BLOCK_TOKENS=block_tokens,
        BLOCK_OUT=block_out,
        TOGETHER=16,
        num_warps=warps,
        num_stages=stages,
    )
    return y
