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
_TOGETHER = 8  # tiles of rows whose programs share blocks of weights in the cache
_MOST_SPLITS = 4
_MOST_SPLIT = 128  # tokens of products whose inputs are split
_PROGRAMS = 3  # programs per processor that splits may add up to
_FEW_ROWS = 64  # least rows of a tile whose weights many other tiles read
_LEAST_ROWS = 8  # as a product's right operand
_MOST_ROWS = 256  # more are multiplied with a dequantized weight


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
def _prefetch(words, tile, split, splits, IN: tl.constexpr, OUT: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """Read the first _PREFETCHED blocks of a tile's words into the L2 cache, while the kernel before still runs."""
    BLOCKS: tl.constexpr = IN // _BLOCK
    index = tl.arange(0, 128)  # a thread each
    block = split * BLOCKS // splits + index
    at = words + block * (OUT * _WORDS) + tile * (BLOCK_OUT * _WORDS)
    is_inside = tile * BLOCK_OUT + BLOCK_OUT <= OUT
    wanted = tl.where(is_inside, tl.minimum((split + 1) * BLOCKS // splits - block, _PREFETCHED - index), 0)
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
    x,  # [tokens, IN]
    words,
    scales,
    zeros,
    output_scales,
    bias,  # [OUT], read if HAS_BIAS
    y,  # out [tokens, OUT]
    parts,  # scratch [splits, tokens, OUT] float32, used if SPLIT
    arrived,  # [tiles] int32, 0 before and after; used if SPLIT
    tokens,
    splits,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    TOGETHER: tl.constexpr,
    E2M1: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    ZEROS: tl.constexpr,
    SPLIT: tl.constexpr,  # there are several splits
    UNROLL: tl.constexpr,
    ONCE: tl.constexpr,
    WAITS: tl.constexpr,
    REST: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles, splits). The other arguments are those of ``products_of_tile``."""
    OUT_BLOCKS: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    tile = tl.program_id(0)
    split = tl.program_id(1)
    if PDL:
        _prefetch(words, tile, split, splits, IN, OUT, BLOCK_OUT)
    wait_for_predecessor(PDL)
    first_tile = tile // (TOGETHER * OUT_BLOCKS) * TOGETHER
    height = tl.minimum(tl.cdiv(tokens, BLOCK_ROWS) - first_tile, TOGETHER)
    row = (first_tile + tile % (TOGETHER * OUT_BLOCKS) % height) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    out = tile % (TOGETHER * OUT_BLOCKS) // height * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    held = row < tokens
    rows = tl.where(held, row, 0).to(tl.int64)
    total = products_of_tile(
        x, words, scales, zeros, output_scales, rows, held, out, split, splits,
        IN, OUT, E2M1, GROUP, WIDTH, SCALE, ZEROS, UNROLL, ONCE, WAITS, REST, DOT,
    )  # fmt: skip
    kept = held[None, :] & (out < OUT)[:, None]
    at = rows[None, :] * OUT + out[:, None]
    is_last = True
    if SPLIT:
        part_size = tokens.to(tl.int64) * OUT
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
            total += tl.load(bias + out, mask=out < OUT, other=0.0).to(tl.float32)[:, None]
        tl.store(y + at, total.to(y.dtype.element_ty), mask=kept)


@triton.jit
def _dequantize_kernel(
    words,
    scales,
    zeros,
    output_scales,
    weight,  # out [OUT, IN]
    IN: tl.constexpr,
    OUT: tl.constexpr,
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
    inside = out < OUT
    word = tl.arange(0, _WORDS)
    factor = tl.load(output_scales + out, mask=inside, other=0.0)
    column = tl.arange(0, _BLOCK)
    for index in range(BLOCKS):
        block = tl.program_id(1) * BLOCKS + index
        exists = out < tl.where(block * _BLOCK < IN, OUT, 0)
        at = words + block * (OUT * _WORDS) + out[:, None] * _WORDS + word[None, :]
        bits = tl.load(at, mask=exists[:, None], other=0)
        scale_bits, zero_bits = load_scales(scales + out, zeros + out, block, exists, OUT, GROUP, WIDTH, ZEROS)
        scale_bits = scale_bits >> place_in_piece(block, GROUP, WIDTH)
        zero_bits = zero_bits >> zero_place(block, GROUP, ZEROS)
        a = float_values(bits, scale_bits, zero_bits, 0, E2M1, GROUP, WIDTH, SCALE, True) * factor[:, None]
        b = float_values(bits, scale_bits, zero_bits, 1, E2M1, GROUP, WIDTH, SCALE, True) * factor[:, None]
        c = float_values(bits, scale_bits, zero_bits, 2, E2M1, GROUP, WIDTH, SCALE, True) * factor[:, None]
        d = float_values(bits, scale_bits, zero_bits, 3, E2M1, GROUP, WIDTH, SCALE, True) * factor[:, None]
        dtype = weight.dtype.element_ty
        values = tl.join(tl.join(a.to(dtype), c.to(dtype)), tl.join(b.to(dtype), d.to(dtype)))
        values = tl.reshape(tl.permute(values, (0, 2, 3, 1)), (BLOCK_OUT, _BLOCK))
        weight_at = weight + out[:, None].to(tl.int64) * IN + (block * _BLOCK + column)[None, :]
        within = (block * _BLOCK + column < IN)[None, :]
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
        IN=stack.inputs,
        OUT=stack.outputs,
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
        tiles = choose_tiles(tokens, stack.outputs, stack.inputs, x.dtype, processors_of(x.device))
    if tiles is None:
        return F.linear(x, dequantize(stack, 0, x.dtype), bias)
    y = x.new_empty(tokens, stack.outputs)
    if not tokens:
        return y
    x = x.contiguous()
    out_tiles = triton.cdiv(stack.outputs, tiles.outputs)
    count = triton.cdiv(tokens, tiles.rows) * out_tiles
    parts = y  # not used
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
        HAS_BIAS=bias is not None,
        WAITS=must_wait(),
        **kernel_options(stack.form, stack.outputs, stack.inputs, x.dtype, tiles),
        **pdl_options(y),
    )
    return y


def kernel_options(form: FourBitForm, outputs: int, inputs: int, dtype: torch.dtype, tiles: Tiles) -> dict[str, Any]:
    """Return the constants and launch options of a product that is cut as ``tiles`` say."""
    return {
        "IN": inputs,
        "OUT": outputs,
        "BLOCK_ROWS": tiles.rows,
        "BLOCK_OUT": tiles.outputs,
        "TOGETHER": _TOGETHER,
        "SPLIT": tiles.splits > 1,
        "UNROLL": tiles.unroll,
        "ONCE": tiles.rows <= _FEW_ROWS,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        **({"maxnreg": tiles.registers} if tiles.registers else {}),
        **form_options(form, inputs, dtype),
    }


def choose_tiles(tokens: int, outputs: int, inputs: int, dtype: torch.dtype, processors: int) -> Tiles | None:
    """Return how a product is cut; None: the weight is dequantized first."""
    if triton.knobs.runtime.interpret:
        return Tiles(16, 64, 2 if inputs >= 4 * layout.BLOCK else 1, 1, 4, 2)
    if dtype == torch.float32 or tokens > _MOST_ROWS:
        return None
    if tokens > _MOST_SPLIT:
        return Tiles(128, 128, 1, 1, 8, 4)
    rows = min(max(triton.next_power_of_2(tokens), _LEAST_ROWS), 64)
    block_out = 128 if triton.cdiv(outputs, 128) >= processors else 64
    unroll = 4 if rows <= _LEAST_ROWS else 2
    programs = triton.cdiv(outputs, block_out) * triton.cdiv(tokens, rows)
    steps = layout.blocks_of(inputs) // unroll
    splits = max(1, min(_PROGRAMS * processors // programs, steps // 2, _MOST_SPLITS))
    return Tiles(rows, block_out, splits, unroll, 4, 3)
