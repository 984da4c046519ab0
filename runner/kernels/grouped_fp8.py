"""Products of tokens with the FP8 weights (E4M3) of their experts; the rows are those of ``grouped_gemm.py``.

E4M3 is exact in bfloat16 and float16, so weights are converted and the sums are scaled. Sums are in float32. The plain
form is a product with dequantized weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.kernels.fp8_products import quantize
from runner.kernels.grouped_gemm import DOT, GroupedRows

_MANY = 64  # rows of a tile from which activations are FP8: an estimate, not measured; below, reads of weights bound


@triton.jit(do_not_specialize=["count", "first_expert", "num_experts", "tiles"])
def _grouped_fp8_kernel(
    x,  # [count / ROWS_PER_TOKEN, IN], E4M3 if QUANTIZED
    x_scales,  # [count / ROWS_PER_TOKEN, groups] float32, read if QUANTIZED
    weight,  # [num_experts, OUT, IN] E4M3
    scales,  # [num_experts, OUT / ROW_BLOCK, groups] float32
    y,  # out [count, OUT]
    assignments,  # [tiles * BLOCK_ROWS] int32, read if SORTED
    experts,  # [tiles] int32
    count,
    first_expert,  # of ``experts`` if not SORTED
    num_experts,
    tiles,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    GROUPED: tl.constexpr,  # a scale per BLOCK_IN inputs; else one for all
    QUANTIZED: tl.constexpr,
    ROWS_PER_TOKEN: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    TOGETHER: tl.constexpr,
    DOT: tl.constexpr,
):
    """Grid (tiles * blocks of OUT,). Programs of TOGETHER tiles share blocks of weights in the cache."""
    OUT_BLOCKS: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    ROW_BLOCKS: tl.constexpr = (OUT + ROW_BLOCK - 1) // ROW_BLOCK
    GROUPS: tl.constexpr = (IN + BLOCK_IN - 1) // BLOCK_IN if GROUPED else 1
    program = tl.program_id(0)
    first_tile = program // (TOGETHER * OUT_BLOCKS) * TOGETHER
    height = tl.minimum(tiles - first_tile, TOGETHER)
    tile = first_tile + program % (TOGETHER * OUT_BLOCKS) % height
    out_block = program % (TOGETHER * OUT_BLOCKS) // height

    row = tl.arange(0, BLOCK_ROWS)
    if SORTED:
        expert = tl.load(experts + tile)
        known = expert >= 0
    else:
        expert = tl.load(experts + tile) - first_expert
        known = (expert >= 0) & (expert < num_experts)
    if known:
        if SORTED:
            assignment = tl.load(assignments + tile * BLOCK_ROWS + row)
        else:
            assignment = tl.where(row == 0, tile, count)
        held = assignment < count
        rows = tl.where(held, assignment, 0).to(tl.int64)
        token = rows // ROWS_PER_TOKEN
        column = tl.arange(0, BLOCK_IN)
        out = out_block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        inside = out < OUT
        x_at = x + token[:, None] * IN + column[None, :]
        weight_at = weight + expert.to(tl.int64) * OUT * IN + out[None, :].to(tl.int64) * IN + column[:, None]
        scale_at = scales + (expert.to(tl.int64) * ROW_BLOCKS + out // ROW_BLOCK) * GROUPS
        total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
        for begin in range(0, IN, BLOCK_IN):
            within = column < IN - begin
            values = tl.load(x_at + begin, mask=held[:, None] & within[None, :], other=0.0)
            weights = tl.load(weight_at + begin, mask=within[:, None] & inside[None, :], other=0.0)
            if not QUANTIZED:
                values = values.to(DOT)
                weights = weights.to(DOT)
            if GROUPED:
                scale = tl.load(scale_at + begin // BLOCK_IN, mask=inside, other=0.0)
                part = tl.dot(values, weights, input_precision="ieee") * scale[None, :]
                if QUANTIZED:
                    part = part * tl.load(x_scales + token * GROUPS + begin // BLOCK_IN)[:, None]
                total += part
            else:
                total = tl.dot(values, weights, total, input_precision="ieee")
        if not GROUPED:
            total = total * tl.load(scale_at, mask=inside, other=0.0)[None, :]
            if QUANTIZED:
                total = total * tl.load(x_scales + token)[:, None]
        y_at = y + rows[:, None] * OUT + out[None, :]
        tl.store(y_at, total.to(y.dtype.element_ty), mask=held[:, None] & inside[None, :])


def grouped_fp8(
    x: Tensor, weight: Tensor, scales: Tensor, row_block: int, group: int, rows: GroupedRows, in_fp8: bool
) -> Tensor:
    """Return the product of each assignment, [tokens * top_k, out_features]; of other ranks' experts it is undefined.

    x is [tokens, in_features], or [tokens * top_k, in_features] with a row per assignment. weight [experts,
    out_features, in_features] has scales [experts, out_features / row_block, in_features / group]; a ``group`` of
    several is a power of two. ``in_fp8``: activations of tiles with many rows are quantized.
    """
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert scales.is_contiguous()
    count, tokens = rows.experts.numel(), rows.tokens
    _, out_features, in_features = weight.shape
    y = x.new_empty(count, out_features)
    if not count:
        return y
    interpreted = triton.knobs.runtime.interpret
    exact, many = x.dtype == torch.float32, rows.tile_rows >= _MANY
    grouped, quantized = scales.shape[2] > 1, in_fp8 and many
    values, x_scales = quantize(x, group) if quantized else (x, scales)
    block_out = 32 if exact and not interpreted else 128 if many else 64
    block_in = group if grouped else min(32 if exact else 128, max(16, triton.next_power_of_2(in_features)))
    _grouped_fp8_kernel[(rows.tiles * triton.cdiv(out_features, block_out),)](
        values,
        x_scales,
        weight,
        scales,
        y,
        rows.experts if tokens is None else tokens.assignments,
        rows.experts if tokens is None else tokens.experts,
        count,
        rows.local.start,
        len(rows.local),
        rows.tiles,
        IN=in_features,
        OUT=out_features,
        ROW_BLOCK=row_block,
        GROUPED=grouped,
        QUANTIZED=quantized,
        ROWS_PER_TOKEN=count // x.shape[0],
        SORTED=tokens is not None,
        BLOCK_ROWS=rows.tile_rows,
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        TOGETHER=8 if many else 1,
        DOT=tl.float32 if interpreted else DOT[x.dtype],  # numpy, in which the interpreter multiplies, has no bfloat16
        num_warps=8 if rows.tile_rows >= 128 else 4,
        num_stages=2 if exact else 3 if many else 4,
    )
    return y
