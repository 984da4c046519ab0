"""Products of rows with a 4-bit weight.

Where a weight has too few tiles of outputs for all processors, several programs share a tile: each sums a part of the
inputs and stores it, and the one that ends last adds the parts, always in the same order. Many rows are multiplied by
the device's own library with a dequantized weight, which exists only meanwhile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from runner.kernels.dependent_launch import pdl_options, wait_for_predecessor
from runner.kernels.device_limits import processors_of
from runner.kernels.experts.grouped_mxfp4 import must_wait
from runner.kernels.four_bits import words as layout
from runner.kernels.four_bits.stack import FourBitForm, FourBitStack
from runner.kernels.four_bits.unpacking import (
    float_values,
    form_options,
    load_scales,
    place_in_piece,
    products_of_tile,
    zero_place,
)

_WORDS = tl.constexpr(layout.WORDS)
_BLOCK = tl.constexpr(layout.BLOCK)
_PREFETCHED = tl.constexpr(8)  # blocks of inputs
_FEW_ROWS = 64  # least rows of a tile whose weights many other tiles read
_LEAST_ROWS = 8  # as a product's right operand
DEPENDENT_ROWS = 1  # most tokens of products with dependent launch


class Tiles(NamedTuple):
    """How a product is cut into programs."""

    rows: int
    outputs: int
    splits: int
    unroll: int  # blocks of inputs in a step
    warps: int
    stages: int
    registers: int = 0  # most of a thread, so that more programs run on a processor; 0: as the compiler likes


@triton.jit
def _prefetch(words, tile, split, splits, inputs, outputs, BLOCK_OUT: tl.constexpr):
    """Read the first _PREFETCHED blocks of a tile's words into the L2 cache, while the kernel before still runs."""
    blocks = inputs // _BLOCK
    index = tl.arange(0, 128)  # a thread each
    block = split * blocks // splits + index
    at = words + block * (outputs * _WORDS) + tile * (BLOCK_OUT * _WORDS)
    is_inside = tile * BLOCK_OUT + BLOCK_OUT <= outputs
    wanted = tl.where(is_inside, tl.minimum((split + 1) * blocks // splits - block, _PREFETCHED - index), 0)
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.b32 $0, 0;}",
        "=r,l,r,r",
        [at.to(tl.int64), wanted, tl.full([128], BLOCK_OUT * _WORDS * 2, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["tokens", "splits"])
def _product_kernel(
    x,  # [tokens, inputs]
    words,
    scales,
    zeros,
    output_scales,
    bias,  # [outputs], read if HAS_BIAS
    y,  # out [tokens, outputs]
    parts,  # scratch [splits, tokens, outputs] float32, used if SPLIT
    arrived,  # [tiles] int32, 0 before and after; used if SPLIT
    tokens,
    splits,
    inputs,
    outputs,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    E2M1: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    ZEROS: tl.constexpr,
    SPLIT: tl.constexpr,  # there may be several splits
    UNROLL: tl.constexpr,
    WHOLE: tl.constexpr,
    ONCE: tl.constexpr,
    WAITS: tl.constexpr,
    REST: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles, splits). The other arguments are those of ``products_of_tile``."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    height = tl.cdiv(tokens, BLOCK_ROWS)  # tiles that share a block of weights, one after the other
    if PDL:
        _prefetch(words, tile // height, split, splits, inputs, outputs, BLOCK_OUT)
    wait_for_predecessor(PDL)
    row = tile % height * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    out = tile // height * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    held = row < tokens
    rows = tl.where(held, row, 0).to(tl.int64)
    total = products_of_tile(
        x, words, scales, zeros, output_scales, rows, held, out, split, splits, inputs, outputs,
        E2M1, GROUP, WIDTH, SCALE, ZEROS, UNROLL, WHOLE, ONCE, WAITS, REST, DOT,
    )  # fmt: skip
    kept = held[None, :] & (out < outputs)[:, None]
    at = rows[None, :] * outputs + out[:, None]
    is_last = True
    if SPLIT:
        part_size = tokens.to(tl.int64) * outputs
        tl.store(parts + split * part_size + at, total, mask=kept)
        tl.debug_barrier()  # all threads have written before this part counts
        is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
        if is_last:
            tl.debug_barrier()
            total = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
            for other in range(splits):
                total += tl.load(parts + other * part_size + at, mask=kept, other=0.0, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    if is_last:
        if HAS_BIAS:
            total += tl.load(bias + out, mask=out < outputs, other=0.0).to(tl.float32)[:, None]
        tl.store(y + at, total.to(y.dtype.element_ty), mask=kept)


@triton.jit
def _dequantize_kernel(
    words,
    scales,
    zeros,
    output_scales,
    weight,  # out [outputs, inputs]
    inputs,
    outputs,
    E2M1: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCKS: tl.constexpr,  # that a program dequantizes
):
    """Grid (tiles of outputs, parts of the inputs)."""
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inside = out < outputs
    word = tl.arange(0, _WORDS)
    factor = tl.load(output_scales + out, mask=inside, other=0.0)
    column = tl.arange(0, _BLOCK)
    for index in range(BLOCKS):
        block = tl.program_id(1) * BLOCKS + index
        exists = out < tl.where(block * _BLOCK < inputs, outputs, 0)
        at = words + block * (outputs * _WORDS) + out[:, None] * _WORDS + word[None, :]
        bits = tl.load(at, mask=exists[:, None], other=0)
        scale_bits, zero_bits = load_scales(scales + out, zeros + out, block, exists, outputs, GROUP, WIDTH, ZEROS)
        scale_bits = scale_bits >> place_in_piece(block, GROUP, WIDTH)
        zero_bits = zero_bits >> zero_place(block, GROUP, ZEROS)
        a = float_values(bits, scale_bits, zero_bits, 0, E2M1, GROUP, WIDTH, SCALE, True) * factor[:, None]
        b = float_values(bits, scale_bits, zero_bits, 1, E2M1, GROUP, WIDTH, SCALE, True) * factor[:, None]
        c = float_values(bits, scale_bits, zero_bits, 2, E2M1, GROUP, WIDTH, SCALE, True) * factor[:, None]
        d = float_values(bits, scale_bits, zero_bits, 3, E2M1, GROUP, WIDTH, SCALE, True) * factor[:, None]
        dtype = weight.dtype.element_ty
        values = tl.join(tl.join(a.to(dtype), c.to(dtype)), tl.join(b.to(dtype), d.to(dtype)))
        values = tl.reshape(tl.permute(values, (0, 2, 3, 1)), (BLOCK_OUT, _BLOCK))
        weight_at = weight + out[:, None].to(tl.int64) * inputs + (block * _BLOCK + column)[None, :]
        within = (block * _BLOCK + column < inputs)[None, :]
        tl.store(weight_at, values, mask=inside[:, None] & within)


def dequantize(stack: FourBitStack, expert: int, dtype: torch.dtype) -> Tensor:
    """Return a weight [outputs, inputs] in ``dtype``, rounded once from float32."""
    weight = torch.empty(stack.outputs, stack.inputs, dtype=dtype, device=stack.words.device)
    options = form_options(stack.form, stack.inputs, dtype)
    constants = {name: options[name] for name in ("E2M1", "GROUP", "WIDTH", "SCALE", "ZEROS")}
    block_out = 64
    blocks = 4
    _dequantize_kernel[(triton.cdiv(stack.outputs, block_out), triton.cdiv(layout.blocks_of(stack.inputs), blocks))](
        stack.words[expert],
        stack.scales[expert],
        stack.zeros[expert],
        stack.output_scales[expert],
        weight,
        stack.inputs,
        stack.outputs,
        BLOCK_OUT=block_out,
        BLOCKS=blocks,
        num_warps=4,
        **constants,
    )
    return weight


def product(x: Tensor, stack: FourBitStack, bias: Tensor | None = None, tiles: Tiles | None = None) -> Tensor:
    """Return [tokens, outputs] of x [tokens, inputs], in its dtype; ``tiles`` None: those of ``choose_tiles``."""
    tokens = x.shape[0]
    if tiles is None:
        tiles = choose_tiles(tokens, stack.outputs, stack.inputs, stack.form, x.dtype, processors_of(x.device))
    if tiles is None:
        return F.linear(x, dequantize(stack, 0, x.dtype), bias)
    y = x.new_empty(tokens, stack.outputs)
    if not tokens:
        return y
    x = x.contiguous()
    out_tiles = triton.cdiv(stack.outputs, tiles.outputs)
    count = triton.cdiv(tokens, tiles.rows) * out_tiles
    parts = stack.output_scales  # not used
    if tiles.splits > 1:
        assert count <= len(stack.arrived), "a product with split inputs has few tiles"
        parts = torch.empty(tiles.splits, tokens, stack.outputs, dtype=torch.float32, device=x.device)
    _product_kernel[(count, tiles.splits)](
        x,
        stack.words,
        stack.scales,
        stack.zeros,
        stack.output_scales,
        y if bias is None else bias,
        y,
        parts,
        stack.arrived,
        tokens,
        tiles.splits,
        stack.inputs,
        stack.outputs,
        HAS_BIAS=bias is not None,
        WAITS=must_wait(),
        **kernel_options(stack.form, stack.inputs, x.dtype, tiles),
        **pdl_options(y, DEPENDENT_ROWS),
    )
    return y


def kernel_options(form: FourBitForm, inputs: int, dtype: torch.dtype, tiles: Tiles) -> dict[str, Any]:
    """Return the constants and launch options of a product that is cut as ``tiles`` say.

    Sizes are none of them, so that the layers of a model share kernels.
    """
    return {
        "BLOCK_ROWS": tiles.rows,
        "BLOCK_OUT": tiles.outputs,
        "SPLIT": tiles.splits > 1,
        "UNROLL": tiles.unroll,
        "WHOLE": inputs % (tiles.unroll * layout.BLOCK) == 0,
        "ONCE": tiles.rows <= _FEW_ROWS,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        **({"maxnreg": tiles.registers} if tiles.registers else {}),
        **form_options(form, inputs, dtype),
    }


#: Outputs of a tile, blocks in a step, warps and stages by the rows of a tile, as an H200 multiplies fastest
#: (bench/four_bit_products.py). A weight is wide if its tiles keep all processors busy; the inputs of others are split.
_WIDE = {8: (128, 4, 4, 3), 16: (128, 2, 4, 3), 32: (128, 2, 4, 3), 64: (128, 2, 4, 3), 128: (128, 1, 8, 4)}
_NARROW = {8: (64, 2, 4, 4), 16: (64, 2, 4, 4), 32: (64, 2, 4, 4), 64: (64, 2, 4, 3), 128: (64, 1, 4, 4)}
_NARROW_INT4 = {**_NARROW, 8: (64, 4, 4, 3)}
_MOST_ROWS = {True: 512, False: 256}  # by whether a weight is wide; more are multiplied with a dequantized weight
_MOST_SPLITS = 8
_SPLIT = 16  # least blocks of a split


def choose_tiles(
    tokens: int, outputs: int, inputs: int, form: FourBitForm, dtype: torch.dtype, processors: int
) -> Tiles | None:
    """Return how a product is cut; None: the weight is dequantized first."""
    if triton.knobs.runtime.interpret:
        return Tiles(16, 64, 2 if inputs >= 4 * layout.BLOCK else 1, 1, 4, 2)
    is_wide = triton.cdiv(outputs, 128) >= processors
    if dtype == torch.float32 or tokens > _MOST_ROWS[is_wide]:
        return None
    rows = min(max(triton.next_power_of_2(tokens), _LEAST_ROWS), 128)
    if is_wide:
        block_out, *options = _WIDE[rows]
        return Tiles(rows, block_out, 1, *options)
    if tokens <= 128:
        rows = min(rows, 64)
    block_out, *options = (_NARROW if form.is_e2m1 else _NARROW_INT4)[rows]
    programs = triton.cdiv(outputs, block_out) * triton.cdiv(tokens, rows)
    together = 2 if rows > _FEW_ROWS else 3  # programs that fit on a processor
    splits = max(1, min(together * processors // programs, layout.blocks_of(inputs) // _SPLIT, _MOST_SPLITS))
    return Tiles(rows, block_out, splits, *options)
