"""Products of tokens with the 4-bit weights of their experts; the rows are those of ``grouped_tiles.py``."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.kernels.experts.grouped_mxfp4 import must_wait
from runner.kernels.experts.grouped_tiles import (
    GroupedRows,
    assignments_of_tile,
    expert_of_tile,
    group_rows,
    held_rows,
    tile_of_program,
)
from runner.kernels.four_bits import words as layout
from runner.kernels.four_bits.products import Tiles
from runner.kernels.four_bits.stack import FourBitForm, FourBitStack
from runner.kernels.four_bits.unpacking import form_options, products_of_tile

_WORDS = tl.constexpr(layout.WORDS)
_LEAST_ROWS = 8  # least rows of a tile, as a product's right operand
_MOST_ROWS = 128
_SHARED_TILES = 8  # tiles of rows whose programs share blocks of weights in the cache


@triton.jit(
    do_not_specialize=[
        "count", "first_expert", "num_experts", "tiles", "blocks", "scale_pieces", "zero_pieces", "rows_per_token"
    ]
)  # fmt: skip
def _grouped_kernel(
    x,  # [count / rows_per_token, inputs]
    words,  # [num_experts, blocks, outputs, _WORDS] int16
    scales,  # [num_experts, scale_pieces, outputs] int32
    zeros,  # [num_experts, zero_pieces, outputs] int32, read if ZEROS is separate
    output_scales,  # [num_experts, outputs] float32
    bias,  # [num_experts, outputs], read if HAS_BIAS
    y,  # out [count, outputs]
    assignments,  # [tiles * BLOCK_ROWS] int32, read if SORTED
    experts,  # [tiles] int32
    count,
    first_expert,  # this rank's first expert, for ``experts`` if not SORTED
    num_experts,
    tiles,
    blocks,
    scale_pieces,
    zero_pieces,
    rows_per_token,
    inputs,
    outputs,
    HAS_BIAS: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    TOGETHER: tl.constexpr,
    E2M1: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    ZEROS: tl.constexpr,
    UNROLL: tl.constexpr,
    WHOLE: tl.constexpr,
    WAITS: tl.constexpr,
    REST: tl.constexpr,
    DOT: tl.constexpr,
):
    """Grid (tiles * blocks of outputs,). Programs of TOGETHER tiles share blocks of weights in the cache."""
    tile, out_block = tile_of_program(tiles, tl.cdiv(outputs, BLOCK_OUT), TOGETHER)
    expert, has_expert = expert_of_tile(experts, tile, first_expert, num_experts, SORTED)
    if has_expert:
        assignment = assignments_of_tile(assignments, tile, count, SORTED, BLOCK_ROWS)
        held, rows = held_rows(assignment, count)
        out = out_block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        stack = expert.to(tl.int64) * outputs
        total = products_of_tile(
            x,
            words + stack * (blocks * _WORDS),
            scales + stack * scale_pieces,
            zeros + stack * zero_pieces,
            output_scales + stack,
            tl.where(held, assignment // rows_per_token, 0).to(tl.int64),
            held,
            out,
            0,
            1,
            inputs, outputs, E2M1, GROUP, WIDTH, SCALE, ZEROS, UNROLL, WHOLE, TOGETHER == 1, WAITS, REST, DOT,
        )  # fmt: skip
        if HAS_BIAS:
            total += tl.load(bias + stack + out, mask=out < outputs, other=0.0).to(tl.float32)[:, None]
        y_at = y + rows[None, :] * outputs + out[:, None]
        tl.store(y_at, total.to(y.dtype.element_ty), mask=held[None, :] & (out < outputs)[:, None])


def rows_of_experts(experts: Tensor, local: range) -> GroupedRows:
    """Return the rows of the products of experts [tokens, top_k] int32; ``local`` are this rank's experts."""
    return group_rows(experts, local, _LEAST_ROWS, _MOST_ROWS)


def grouped_product(
    x: Tensor, stack: FourBitStack, rows: GroupedRows, bias: Tensor | None = None, tiles: Tiles | None = None
) -> Tensor:
    """Return the product of each assignment, as ``FourBitExperts.product``; ``tiles`` None: of ``choose_tiles``."""
    assert x.is_contiguous()
    count = rows.num_assignments
    y = x.new_empty(count, stack.outputs)
    if not count:
        return y
    is_sorted = rows.tokens is not None
    tiles = tiles or choose_tiles(rows.tile_rows, is_sorted, x.dtype)
    _grouped_kernel[(rows.tiles * triton.cdiv(stack.outputs, tiles.outputs),)](
        x,
        stack.words,
        stack.scales,
        stack.zeros,
        stack.output_scales,
        y if bias is None else bias,
        y,
        rows.assignments,
        rows.tile_experts,
        count,
        rows.local.start,
        len(rows.local),
        rows.tiles,
        stack.words.shape[1],
        stack.scales.shape[1],
        stack.zeros.shape[1],
        count // x.shape[0],
        stack.inputs,
        stack.outputs,
        HAS_BIAS=bias is not None,
        WAITS=must_wait(),
        SORTED=is_sorted,
        BLOCK_ROWS=rows.tile_rows,
        **kernel_options(stack.form, stack.inputs, x.dtype, tiles),
    )
    return y


def kernel_options(form: FourBitForm, inputs: int, dtype: torch.dtype, tiles: Tiles) -> dict[str, Any]:
    """Return constants and launch options of products that are cut as ``tiles`` say; sizes are none of them."""
    return {
        "BLOCK_OUT": tiles.outputs,
        "TOGETHER": 1 if tiles.rows <= 32 else _SHARED_TILES,
        "UNROLL": tiles.unroll,
        "WHOLE": inputs % (tiles.unroll * layout.BLOCK) == 0,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        **({"maxnreg": tiles.registers} if tiles.registers else {}),
        **form_options(form, inputs, dtype),
    }


def choose_tiles(rows: int, is_sorted: bool, dtype: torch.dtype) -> Tiles:
    """Return how products with tiles of ``rows`` are cut: few rows read weights, many rows compute.

    An H200 multiplies fastest so (bench/four_bit_products.py). Unsorted rows are few: an expert has one or two.
    """
    if dtype == torch.float32:  # multiplied without tensor cores, out of registers: small tiles
        return Tiles(rows, 32, 1, 1, 4, 2)
    if rows > 64:
        return Tiles(rows, 128, 1, 1, 8, 4)
    return Tiles(rows, 128, 1, 2 if is_sorted else 4, 4, 3)
