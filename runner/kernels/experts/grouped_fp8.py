"""Products of tokens with the FP8 weights (E4M3) of their experts; the rows are those of ``grouped_tiles.py``.

Quantized activations are multiplied as they are. For others, weights are converted: E4M3 is exact in bfloat16 and
float16. Sums are in float32, and are scaled. The plain form is a product with dequantized weights.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.batch import Quantized
from runner.kernels.experts.grouped_tiles import (
    DOT,
    GroupedRows,
    assignments_of_tile,
    expert_of_tile,
    held_rows,
    tile_of_program,
)

#: Rows of a tile from which products bound its time, not reads of weights. On an H200, 8,192 tokens of Qwen3-30B-A3B's
#: experts took 908 us in tiles of this many rows, and 986 in tiles of twice as many.
MOST_ROWS = 64


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
    first_expert,  # this rank's first expert, for ``experts`` if not SORTED
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
    ONE_SCALE: tl.constexpr = ROW_BLOCK % BLOCK_OUT == 0  # for all outputs of a program
    tile, out_block = tile_of_program(tiles, OUT_BLOCKS, TOGETHER)
    expert, has_expert = expert_of_tile(experts, tile, first_expert, num_experts, SORTED)
    if has_expert:
        held, rows = held_rows(assignments_of_tile(assignments, tile, count, SORTED, BLOCK_ROWS), count)
        token = rows // ROWS_PER_TOKEN
        column = tl.arange(0, BLOCK_IN)
        out = out_block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        inside = out < OUT
        x_at = x + token[:, None] * IN + column[None, :]
        weight_at = weight + expert.to(tl.int64) * OUT * IN + out[None, :].to(tl.int64) * IN + column[:, None]
        x_scales_at = x_scales + token * GROUPS
        x_scale = tl.zeros([BLOCK_ROWS], tl.float32) + 1.0
        if QUANTIZED:
            x_scale = tl.load(x_scales_at)
        if ONE_SCALE:
            scales_at = scales + (expert.to(tl.int64) * ROW_BLOCKS + out_block * BLOCK_OUT // ROW_BLOCK) * GROUPS
            scale = tl.load(scales_at)
        else:
            scales_at = scales + (expert.to(tl.int64) * ROW_BLOCKS + out // ROW_BLOCK) * GROUPS
            scale = tl.load(scales_at, mask=inside, other=0.0)
        total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
        for begin in range(0, IN, BLOCK_IN):
            within = column < IN - begin
            values = tl.load(x_at + begin, mask=held[:, None] & within[None, :], other=0.0)
            weights = tl.load(weight_at + begin, mask=within[:, None] & inside[None, :], other=0.0)
            if not QUANTIZED:
                values = values.to(DOT)
                weights = weights.to(DOT)
            if GROUPED:
                part = tl.dot(values, weights, input_precision="ieee")
                total += _scaled(part, scale, x_scale, ONE_SCALE, QUANTIZED)
                # The scales of the next group are read while this one is multiplied.
                group = tl.minimum(begin // BLOCK_IN + 1, GROUPS - 1)
                if ONE_SCALE:
                    scale = tl.load(scales_at + group)
                else:
                    scale = tl.load(scales_at + group, mask=inside, other=0.0)
                if QUANTIZED:
                    x_scale = tl.load(x_scales_at + group)
            else:
                total = tl.dot(values, weights, total, input_precision="ieee")
        if not GROUPED:
            total = _scaled(total, scale, x_scale, ONE_SCALE, QUANTIZED)
        y_at = y + rows[:, None] * OUT + out[None, :]
        tl.store(y_at, total.to(y.dtype.element_ty), mask=held[:, None] & inside[None, :])


@triton.jit
def _scaled(sums, scale, x_scale, ONE_SCALE: tl.constexpr, QUANTIZED: tl.constexpr):
    """Scale sums [BLOCK_ROWS, BLOCK_OUT] by the weights' scale, one or [BLOCK_OUT], and x_scale [BLOCK_ROWS]."""
    if ONE_SCALE:
        sums = sums * (x_scale * scale)[:, None]
    else:
        sums = sums * scale[None, :]
        if QUANTIZED:
            sums = sums * x_scale[:, None]
    return sums


def grouped_fp8(
    x: Tensor | Quantized, weight: Tensor, scales: Tensor, row_block: int, group: int, rows: GroupedRows
) -> Tensor:
    """Return the product of each assignment, [tokens * top_k, out_features]; undefined for other ranks' experts.

    x is [tokens, in_features], or [tokens * top_k, in_features] with a row per assignment; the product of quantized
    numbers is bfloat16. weight [experts, out_features, in_features] has scales [experts, out_features / row_block,
    in_features / group], as quantized x has; a ``group`` of several is a power of two.
    """
    is_quantized = isinstance(x, Quantized)
    values, x_scales = x if isinstance(x, Quantized) else (x, scales)
    assert values.is_contiguous()
    assert weight.is_contiguous()
    assert scales.is_contiguous()
    count = rows.num_assignments
    _, out_features, in_features = weight.shape
    y = torch.empty(count, out_features, dtype=torch.bfloat16 if is_quantized else values.dtype, device=values.device)
    if not count:
        return y
    grouped = scales.shape[2] > 1
    options = _options(rows.tile_rows, in_features, group if grouped else 0, values.dtype)
    _grouped_fp8_kernel[(rows.tiles * triton.cdiv(out_features, options["BLOCK_OUT"]),)](
        values,
        x_scales,
        weight,
        scales,
        y,
        rows.assignments,
        rows.tile_experts,
        count,
        rows.local.start,
        len(rows.local),
        rows.tiles,
        IN=in_features,
        OUT=out_features,
        ROW_BLOCK=row_block,
        GROUPED=grouped,
        QUANTIZED=is_quantized,
        ROWS_PER_TOKEN=count // values.shape[0],
        SORTED=rows.tokens is not None,
        BLOCK_ROWS=rows.tile_rows,
        **options,
    )
    return y


def _options(tile_rows: int, in_features: int, group: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return tile sizes: few rows read weights, many rows compute. ``group``: inputs that share a scale; 0: all."""
    interpreted = triton.knobs.runtime.interpret
    exact = dtype == torch.float32
    many = tile_rows >= MOST_ROWS
    quantized = dtype == torch.float8_e4m3fn
    return {
        "BLOCK_OUT": 32 if exact and not interpreted else 128 if many or quantized else 64,
        "BLOCK_IN": group or min(32 if exact else 128, max(16, triton.next_power_of_2(in_features))),
        "TOGETHER": 8 if many else 1,
        # numpy, in which the interpreter multiplies, has no bfloat16. Quantized numbers are not converted.
        "DOT": tl.float32 if interpreted else DOT.get(dtype),
        "num_warps": 4,
        "num_stages": 2 if exact else 3 if many and not quantized else 4,
    }
