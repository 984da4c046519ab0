"""Products of tokens with the MXFP4 weights of their experts; the rows are those of ``grouped_gemm.py``.

Weights are dequantized in registers, and activations stay as they are. Weights are the left operand, which Hopper's
tensor cores take from registers. Sums are in float32. The plain form is a product with dequantized weights.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.kernels import mxfp4_words
from runner.kernels.grouped_gemm import DOT, GroupedRows, has_large_memory

_BFLOAT16 = tl.constexpr(tl.bfloat16)
_REST = tl.constexpr(2.0 ** (126 - mxfp4_words.SCALE_SHIFT))  # the part of a weight's scale that stored scales lack
_MANY = 64  # rows of a tile from which products bound its time; below, reads of weights do

# Two words, and the scales of two columns in both blocks: the four values of each word, scaled.
_UNPACK = tl.constexpr("""{
.reg .b32 a, b, c, d, e, zero;
mov.b32 zero, 0x80008000;
and.b32 a, $4, 0x81C081C0;
shl.b32 b, $4, 3;
and.b32 b, b, 0x81C081C0;
shl.b32 c, $4, 6;
and.b32 c, c, 0x81C081C0;
shl.b32 d, $4, 1;
and.b32 d, d, 0x80008000;
shr.b32 e, $4, 3;
and.b32 e, e, 0x01800180;
or.b32 d, d, e;
shr.b32 e, $4, 7;
and.b32 e, e, 0x00400040;
or.b32 d, d, e;
fma.rn.bf16x2 $0, a, $5, zero;
fma.rn.bf16x2 $1, b, $5, zero;
fma.rn.bf16x2 $2, c, $6, zero;
fma.rn.bf16x2 $3, d, $6, zero;
}""")


@triton.jit
def _dequantized(bits, exponents, DOT: tl.constexpr):
    """Return values in DOT of the bits of numbers 2^-126 times as large, and of stored exponents."""
    values = (bits << 16).to(tl.float32, bitcast=True) * (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return (values * _REST).to(DOT)


@triton.jit
def _unpack(words, first, second, DOT: tl.constexpr):
    """Return the four values of each word; those of bfloat16 lack the factor _REST.

    ``first`` has the stored scales of values 0 and 1, ``second`` of 2 and 3, all shaped as ``words``.
    """
    if DOT == _BFLOAT16:
        first = (first.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)
        second = (second.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)
        a, b, c, d = tl.inline_asm_elementwise(
            _UNPACK,
            "=r,=r,=r,=r,r,r,r",
            [words, first, second],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
        return a, b, c, d
    bits = words.to(tl.int32)
    a = _dequantized(bits & 0x81C0, first, DOT)
    b = _dequantized((bits << 3) & 0x81C0, first, DOT)
    c = _dequantized((bits << 6) & 0x81C0, second, DOT)
    d = _dequantized(((bits << 1) & 0x8000) | ((bits >> 3) & 0x180) | ((bits >> 7) & 0x40), second, DOT)
    return a, b, c, d


@triton.jit
def _spread(scales, ROWS: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr):
    """Return scales [ROWS, GROUPS] for each word, [ROWS, GROUPS * WORDS]."""
    return tl.reshape(tl.broadcast_to(scales[:, :, None], (ROWS, GROUPS, WORDS)), (ROWS, GROUPS * WORDS))


@triton.jit(do_not_specialize=["count", "first_expert", "num_experts", "tiles"])
def _grouped_mxfp4_kernel(
    x,  # [count / ROWS_PER_TOKEN, IN]
    words,  # [num_experts, groups, OUT, WORDS] int16
    scales,  # [num_experts, pieces, OUT, 2 * PIECE] uint8
    bias,  # [num_experts, OUT]
    y,  # out [count, OUT]
    assignments,  # [tiles * BLOCK_ROWS] int32, read if SORTED
    experts,  # [tiles] int32
    count,
    first_expert,  # of ``experts`` if not SORTED
    num_experts,
    tiles,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS_PER_TOKEN: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    TOGETHER: tl.constexpr,
    DOT: tl.constexpr,
    WORDS: tl.constexpr,
    PIECE: tl.constexpr,  # groups of inputs whose scales are stored together
    GROUPS: tl.constexpr,  # groups of inputs in a step; PIECE or a part of it
):
    """Grid (tiles * blocks of OUT,). Programs of TOGETHER tiles share blocks of weights in the cache."""
    OUT_BLOCKS: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    NUM_GROUPS: tl.constexpr = (IN + 4 * WORDS - 1) // (4 * WORDS)
    STEPS: tl.constexpr = (NUM_GROUPS + GROUPS - 1) // GROUPS
    PIECES: tl.constexpr = (NUM_GROUPS + PIECE - 1) // PIECE
    PARTS: tl.constexpr = PIECE // GROUPS
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
        out = out_block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        inside = out < OUT
        word = tl.arange(0, GROUPS * WORDS)
        group, lane = word // WORDS, word % WORDS
        column = group * (4 * WORDS) + lane
        byte = tl.arange(0, 2 * GROUPS)
        stack = expert.to(tl.int64) * OUT
        words_at = words + stack * (NUM_GROUPS * WORDS) + out[:, None] * WORDS + (group * OUT * WORDS + lane)[None, :]
        scales_at = scales + stack * (PIECES * 2 * PIECE) + out[:, None] * (2 * PIECE) + byte[None, :]
        x_at = x + (rows // ROWS_PER_TOKEN)[None, :] * IN + column[:, None]
        total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
        for step in range(STEPS):
            known_words = inside[:, None] & (group < NUM_GROUPS - step * GROUPS)[None, :]
            packed = tl.load(words_at + step * (GROUPS * OUT * WORDS), mask=known_words, other=0)
            place = step // PARTS * (OUT * 2 * PIECE) + step % PARTS * (2 * GROUPS)
            exponents = tl.load(scales_at + place, mask=inside[:, None], other=0)
            first, second = tl.split(tl.reshape(exponents, (BLOCK_OUT, GROUPS, 2)))
            first = _spread(first, BLOCK_OUT, GROUPS, WORDS)
            second = _spread(second, BLOCK_OUT, GROUPS, WORDS)
            weights = _unpack(packed, first, second, DOT)
            for part in tl.static_range(4):
                begin = step * (GROUPS * 4 * WORDS) + part * WORDS
                within = column < IN - begin
                values = tl.load(x_at + begin, mask=within[:, None] & held[None, :], other=0.0)
                total = tl.dot(weights[part], values.to(DOT), total, input_precision="ieee")
        if DOT == _BFLOAT16:
            total = total * _REST
        total += tl.load(bias + expert.to(tl.int64) * OUT + out, mask=inside, other=0.0).to(tl.float32)[:, None]
        y_at = y + rows[None, :] * OUT + out[:, None]
        tl.store(y_at, total.to(y.dtype.element_ty), mask=held[None, :] & inside[:, None])


def compiler_problem(capability: tuple[int, int], version: str) -> str:
    """Say why a Triton version compiles no right product for a GPU; empty if it does."""
    release = tuple(int(part) for part in version.split(".")[:2])
    if capability < (10, 0) or release >= (3, 9):
        return ""
    return (
        f"Triton {version} compiles products of MXFP4 experts to nothing for GPUs of compute capability "
        f"{capability[0]}.{capability[1]}; install Triton 3.9 or choose V1"
    )


def grouped_mxfp4(x: Tensor, words: Tensor, scales: Tensor, bias: Tensor, rows: GroupedRows) -> Tensor:
    """Return the product of each assignment, [tokens * top_k, out_features]; of other ranks' experts it is undefined.

    x is [tokens, in_features], or [tokens * top_k, in_features] with a row per assignment. Of this rank's experts are
    words [experts, groups, out_features, 16] and scales [experts, steps, out_features, 8] of ``mxfp4_words.py``, and
    bias [experts, out_features].
    """
    assert x.is_contiguous()
    assert words.is_contiguous()
    assert scales.is_contiguous()
    count, tokens = rows.experts.numel(), rows.tokens
    in_features, out_features = x.shape[1], words.shape[2]
    y = x.new_empty(count, out_features)
    if not count:
        return y
    options = _options(rows.tile_rows, x.dtype)
    _grouped_mxfp4_kernel[(rows.tiles * triton.cdiv(out_features, options["BLOCK_OUT"]),)](
        x,
        words,
        scales,
        bias,
        y,
        rows.experts if tokens is None else tokens.assignments,
        rows.experts if tokens is None else tokens.experts,
        count,
        rows.local.start,
        len(rows.local),
        rows.tiles,
        IN=in_features,
        OUT=out_features,
        ROWS_PER_TOKEN=count // x.shape[0],
        SORTED=tokens is not None,
        BLOCK_ROWS=rows.tile_rows,
        WORDS=mxfp4_words.WORDS,
        PIECE=mxfp4_words.SCALED_GROUPS,
        **options,
    )
    return y


def _options(tile_rows: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return tile sizes: few rows read weights, many rows compute."""
    interpreted = triton.knobs.runtime.interpret
    exact, many = dtype == torch.float32, tile_rows >= _MANY
    large = tile_rows == 128 and has_large_memory()
    # H200, both products of gpt-oss-120b. 2 groups in a step beside 4, in us: 562 and 684 at 128 tokens, 727 and 795 at
    # 512. 256 outputs beside 128 at 8,192 tokens: 4,359 and 5,957.
    return {
        "BLOCK_OUT": 32 if exact and not interpreted else 256 if large else 128,
        "GROUPS": 2,
        "TOGETHER": 8 if many else 1,
        # numpy, in which the interpreter multiplies, has no bfloat16.
        "DOT": tl.float32 if interpreted else DOT[dtype],
        "num_warps": 8 if many else 4,
        "num_stages": 2 if exact or (many and not large) else 3,
    }
