"""The values of 4-bit weights in registers, and their products with rows: what all kernels of 4-bit weights share.

Weights are the left operand, which Hopper's tensor cores take from registers: at least 64 outputs, as few as 8 rows.
In bfloat16 a word of four codes becomes four values by masks, shifts and multiplications of pairs; elsewhere, and in
the interpreter, each value is computed in float32 and rounded once.

    codes × scales                     operations in bfloat16                                     exact
    E2M1 × E4M3, E2M1 × E8M0           value * 2^-126, times scale * 2^88 (E8M0: 2^110)           yes
    int4 × bfloat16                    (128 + code) - (128 + zero), times scale                   rounded once
    int4 × float16, float32            the same with a scale in two parts, high and low           rounded once
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from runner.kernels.experts.grouped_mxfp4 import wait_for_products
from runner.kernels.experts.grouped_tiles import DOT
from runner.kernels.four_bits import words as layout
from runner.kernels.four_bits.stack import FourBitForm

_ALL = tl.constexpr(layout.ALL)
_BFLOAT16 = tl.constexpr(tl.bfloat16)
_FLOAT32 = tl.constexpr(tl.float32)
_WORDS = tl.constexpr(layout.WORDS)
_BLOCK = tl.constexpr(layout.BLOCK)
_PART = tl.constexpr(layout.PART)
_PIECE = tl.constexpr(layout.PIECE)
_FEW_ROWS = tl.constexpr(64)
_E2M1_UP = tl.constexpr(2.0**126)
_E4M3_UP = tl.constexpr(2.0**8)
_E8M0_UP = tl.constexpr(2.0**-layout.E8M0_SHIFT)

#: The part of a weight's scale that products in bfloat16 lack, by dtype.
REST = {torch.float8_e4m3fn: 2.0**38, torch.uint8: 2.0 ** (126 - layout.E8M0_SHIFT)}
#: Names of scales' dtypes for kernels.
SCALE_NAMES = {
    torch.float8_e4m3fn: "e4m3",
    torch.uint8: "e8m0",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}

# Two words in $4: eight values of E2M1, 2^-126 of their size, in a, b, c, d.
_E2M1_PARTS = """
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
"""

# $5 and $6: a piece of each word's output, with the scales of the four parts as ``words.py`` stores E4M3. With a
# constant above their exponents, they are bfloat16 numbers, 2^88 of the scales.
_E2M1_E4M3 = tl.constexpr(
    "{.reg .b32 a, b, c, d, e, f, g, h, up, zero; .reg .b16 el, eh, fl, fh, gl, gh, hl, hh;"
    + _E2M1_PARTS
    + """
mov.b32 zero, 0x80008000;
mov.b32 up, 0x60006000;
shl.b32 e, $5, 4;
lop3.b32 e, e, 0x0FF00FF0, up, 0xEA;
shr.b32 f, $5, 4;
lop3.b32 f, f, 0x0FF00FF0, up, 0xEA;
shl.b32 g, $6, 4;
lop3.b32 g, g, 0x0FF00FF0, up, 0xEA;
shr.b32 h, $6, 4;
lop3.b32 h, h, 0x0FF00FF0, up, 0xEA;
mov.b32 {el, eh}, e;
mov.b32 {fl, fh}, f;
mov.b32 {gl, gh}, g;
mov.b32 {hl, hh}, h;
mov.b32 e, {el, gl};
fma.rn.bf16x2 $0, a, e, zero;
mov.b32 e, {fl, hl};
fma.rn.bf16x2 $1, b, e, zero;
mov.b32 e, {eh, gh};
fma.rn.bf16x2 $2, c, e, zero;
mov.b32 e, {fh, hh};
fma.rn.bf16x2 $3, d, e, zero;
}"""
)

# $5 and $6: the low half of each has the two E8M0 scales of an output, as exponents of bfloat16.
_E2M1_E8M0 = tl.constexpr(
    "{.reg .b32 a, b, c, d, e, f, zero;"
    + _E2M1_PARTS
    + """
mov.b32 zero, 0x80008000;
shr.b32 e, $5, $7;
shr.b32 f, $6, $8;
prmt.b32 e, e, f, 0x5410;
and.b32 f, e, 0xFF00FF00;
shr.b32 f, f, 1;
and.b32 e, e, 0x00FF00FF;
shl.b32 e, e, 7;
fma.rn.bf16x2 $0, a, e, zero;
fma.rn.bf16x2 $1, b, e, zero;
fma.rn.bf16x2 $2, c, f, zero;
fma.rn.bf16x2 $3, d, f, zero;
}"""
)

# Two words in $4: eight codes less their zeros, whose bits are in $5 and $6.
_INT4 = tl.constexpr("""{
.reg .b32 a, b, c, d, e, one, high;
mov.b32 one, 0x3F803F80;
mov.b32 high, 0x43004300;
shr.b32 a, $5, $7;
shr.b32 b, $6, $8;
prmt.b32 e, a, b, 0x5410;
and.b32 e, e, 0x007F007F;
or.b32 e, e, 0xC300C300;
lop3.b32 a, $4, 0x000F000F, high, 0xEA;
shr.b32 b, $4, 4;
lop3.b32 b, b, 0x000F000F, high, 0xEA;
shr.b32 c, $4, 8;
lop3.b32 c, c, 0x000F000F, high, 0xEA;
shr.b32 d, $4, 12;
lop3.b32 d, d, 0x000F000F, high, 0xEA;
fma.rn.bf16x2 $0, a, one, e;
fma.rn.bf16x2 $1, b, one, e;
fma.rn.bf16x2 $2, c, one, e;
fma.rn.bf16x2 $3, d, one, e;
}""")

# Codes less zeros as above, in two groups; $9 and $10 have the groups' scales in float16 or bfloat16.
_INT4_HALVES = """{
.reg .b32 a, b, c, d, e, f, g, h, i, j, one, high, zero;
.reg .b16 even, odd;
.reg .f32 x, y;
mov.b32 one, 0x3F803F80;
mov.b32 high, 0x43004300;
mov.b32 zero, 0x80008000;
shr.b32 a, $5, $7;
shr.b32 b, $6, $8;
prmt.b32 e, a, b, 0x5410;
shr.b32 f, e, 8;
and.b32 e, e, 0x007F007F;
and.b32 f, f, 0x007F007F;
or.b32 e, e, 0xC300C300;
or.b32 f, f, 0xC300C300;
lop3.b32 a, $4, 0x000F000F, high, 0xEA;
shr.b32 b, $4, 4;
lop3.b32 b, b, 0x000F000F, high, 0xEA;
shr.b32 c, $4, 8;
lop3.b32 c, c, 0x000F000F, high, 0xEA;
shr.b32 d, $4, 12;
lop3.b32 d, d, 0x000F000F, high, 0xEA;
fma.rn.bf16x2 a, a, one, e;
fma.rn.bf16x2 b, b, one, e;
fma.rn.bf16x2 c, c, one, f;
fma.rn.bf16x2 d, d, one, f;
prmt.b32 e, $9, $10, 0x5410;
prmt.b32 f, $9, $10, 0x7632;
"""
_INT4_BFLOAT16 = tl.constexpr(
    _INT4_HALVES
    + """
fma.rn.bf16x2 $0, a, e, zero;
fma.rn.bf16x2 $1, b, e, zero;
fma.rn.bf16x2 $2, c, f, zero;
fma.rn.bf16x2 $3, d, f, zero;
}"""
)


def _parts(pair: str, high: str, low: str) -> str:
    """Return code that makes bfloat16 pairs of two float16 numbers, and of what these leave of them."""
    return f"""
mov.b32 {{even, odd}}, {pair};
cvt.f32.f16 x, even;
cvt.f32.f16 y, odd;
cvt.rn.bf16x2.f32 {high}, y, x;
shl.b32 {low}, {high}, 16;
sub.f32 x, x, {low};
and.b32 {low}, {high}, 0xFFFF0000;
sub.f32 y, y, {low};
cvt.rn.bf16x2.f32 {low}, y, x;
"""


_INT4_FLOAT16 = tl.constexpr(
    _INT4_HALVES
    + _parts("e", "g", "h")
    + _parts("f", "i", "j")
    + """
fma.rn.bf16x2 e, a, h, zero;
fma.rn.bf16x2 $0, a, g, e;
fma.rn.bf16x2 e, b, h, zero;
fma.rn.bf16x2 $1, b, g, e;
fma.rn.bf16x2 e, c, j, zero;
fma.rn.bf16x2 $2, c, i, e;
fma.rn.bf16x2 e, d, j, zero;
fma.rn.bf16x2 $3, d, i, e;
}"""
)


# The low half of $5 and $6 has the scale of a word's output, the high half its zero.
_INT4_PAIRS = """{
.reg .b32 a, b, c, d, e, f, g, h, one, high, zero;
.reg .b16 even, odd;
.reg .f32 x, y;
mov.b32 one, 0x3F803F80;
mov.b32 high, 0x43004300;
mov.b32 zero, 0x80008000;
prmt.b32 e, $5, $6, 0x7632;
and.b32 e, e, 0x007F007F;
or.b32 e, e, 0xC300C300;
lop3.b32 a, $4, 0x000F000F, high, 0xEA;
shr.b32 b, $4, 4;
lop3.b32 b, b, 0x000F000F, high, 0xEA;
shr.b32 c, $4, 8;
lop3.b32 c, c, 0x000F000F, high, 0xEA;
shr.b32 d, $4, 12;
lop3.b32 d, d, 0x000F000F, high, 0xEA;
fma.rn.bf16x2 a, a, one, e;
fma.rn.bf16x2 b, b, one, e;
fma.rn.bf16x2 c, c, one, e;
fma.rn.bf16x2 d, d, one, e;
prmt.b32 f, $5, $6, 0x5410;
"""
_INT4_PAIRS_BFLOAT16 = tl.constexpr(
    _INT4_PAIRS
    + """
fma.rn.bf16x2 $0, a, f, zero;
fma.rn.bf16x2 $1, b, f, zero;
fma.rn.bf16x2 $2, c, f, zero;
fma.rn.bf16x2 $3, d, f, zero;
}"""
)
_INT4_PAIRS_FLOAT16 = tl.constexpr(
    _INT4_PAIRS
    + _parts("f", "g", "h")
    + """
fma.rn.bf16x2 e, a, h, zero;
fma.rn.bf16x2 $0, a, g, e;
fma.rn.bf16x2 e, b, h, zero;
fma.rn.bf16x2 $1, b, g, e;
fma.rn.bf16x2 e, c, h, zero;
fma.rn.bf16x2 $2, c, g, e;
fma.rn.bf16x2 e, d, h, zero;
fma.rn.bf16x2 $3, d, g, e;
}"""
)


@triton.jit
def scale_values(bits, SCALE: tl.constexpr):
    """Return float32 scales of the low bits of int32 numbers."""
    if SCALE == "e4m3":
        values = (((bits & 0xFF) << 20) | 0x30000000).to(tl.float32, bitcast=True) * _E4M3_UP
    elif SCALE == "e8m0":
        values = ((bits & 0xFF) << 23).to(tl.float32, bitcast=True) * _E8M0_UP
    elif SCALE == "float16":
        values = (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif SCALE == "bfloat16":
        values = (bits << 16).to(tl.float32, bitcast=True)
    else:
        values = bits.to(tl.float32, bitcast=True)
    return values


@triton.jit
def _load_piece(at, block, inside, outputs, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Return the piece [outputs] int32 that has the numbers, of WIDTH bytes, for a block of inputs."""
    if _BLOCK // GROUP * WIDTH == _PIECE:
        piece = block
    else:
        piece = block * _BLOCK // GROUP * WIDTH // _PIECE
    return tl.load(at + piece * outputs, mask=inside, other=0)


@triton.jit
def place_in_piece(block, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Return the lowest bit of a block's numbers in their piece."""
    return block * _BLOCK // GROUP * WIDTH % _PIECE * 8


@triton.jit
def load_scales(
    scales_at,  # [outputs]
    zeros_at,  # [outputs]
    block,
    inside,  # [outputs]
    outputs,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """Return the pieces [outputs] int32 of a block's scales and zeros."""
    scales = _load_piece(scales_at, block, inside, outputs, GROUP, WIDTH)
    if ZEROS == "separate":
        zeros = _load_piece(zeros_at, block, inside, outputs, GROUP, 1)
    elif ZEROS == "none":
        zeros = tl.full(inside.shape, 0x0808, tl.int32)
    else:
        zeros = scales
    return scales, zeros


@triton.jit
def zero_place(block, GROUP: tl.constexpr, ZEROS: tl.constexpr):
    """Return the lowest bit of a block's zeros in the piece of ``load_scales``."""
    if ZEROS == "separate":
        place = place_in_piece(block, GROUP, 1)
    elif ZEROS == "none":
        place = 0
    else:
        place = 16
    return place


@triton.jit
def _spread(row, like):
    """Return numbers [outputs] as [outputs, words]."""
    return tl.broadcast_to(row[:, None], like.shape)


@triton.jit
def _unpack_pairs(
    words,  # [outputs, _WORDS]
    scales,  # [outputs], pieces
    zeros,  # [outputs], pieces
    scales_place,
    zeros_place,
    E2M1: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Return the four values of each word in bfloat16, as the module says, without REST's factor."""
    if E2M1 and SCALE == "e8m0":
        a, b, c, d = tl.inline_asm_elementwise(
            _E2M1_E8M0,
            "=r,=r,=r,=r,r,r,r,r,r",
            [words, _spread(scales, words), scales_place],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif E2M1:
        a, b, c, d = tl.inline_asm_elementwise(
            _E2M1_E4M3,
            "=r,=r,=r,=r,r,r,r",
            [words, _spread(scales, words)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif GROUP < _BLOCK:
        CODE: tl.constexpr = _INT4_BFLOAT16 if SCALE == "bfloat16" else _INT4_FLOAT16
        a, b, c, d = tl.inline_asm_elementwise(
            CODE,
            "=r,=r,=r,=r,r,r,r,r,r,r,r",
            [words, _spread(zeros, words), zeros_place, _spread(scales, words)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif SCALED:
        PAIRS_CODE: tl.constexpr = _INT4_PAIRS_BFLOAT16 if SCALE == "bfloat16" else _INT4_PAIRS_FLOAT16
        a, b, c, d = tl.inline_asm_elementwise(
            PAIRS_CODE,
            "=r,=r,=r,=r,r,r,r",
            [words, _spread(scales, words)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _INT4,
            "=r,=r,=r,=r,r,r,r,r,r",
            [words, _spread(zeros, words), zeros_place],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return a, b, c, d


@triton.jit
def float_values(
    words,
    scales,
    zeros,
    PLACE: tl.constexpr,
    E2M1: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Return part PLACE of each word [outputs, words] in float32, by bits [outputs] of its block."""
    index: tl.constexpr = PLACE * _PART // GROUP
    bits = words.to(tl.int32)
    if E2M1:
        if PLACE == 0:
            bits = bits & 0x81C0
        elif PLACE == 1:
            bits = (bits << 3) & 0x81C0
        elif PLACE == 2:
            bits = (bits << 6) & 0x81C0
        else:
            bits = ((bits << 1) & 0x8000) | ((bits >> 3) & 0x180) | ((bits >> 7) & 0x40)
        values = (bits << 16).to(tl.float32, bitcast=True) * _E2M1_UP
    else:
        zero = (zeros >> (index * 8)) & 0xFF
        values = (((bits >> (4 * PLACE)) & 15) - zero[:, None]).to(tl.float32)
    if SCALED:
        values = values * scale_values(scales >> (index * WIDTH * 8), SCALE)[:, None]
    return values


@triton.jit
def _kept(pieces):
    """Return the same pieces, which the compiler does not load again in another layout."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [pieces], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _weights_of_block(
    words_at,  # [outputs, _WORDS], of the first block
    scales,  # [outputs], pieces
    zeros,  # [outputs], pieces
    scales_place,
    zeros_place,
    block,
    inside,  # [outputs]
    outputs,
    E2M1: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    SCALED: tl.constexpr,
    ONCE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Return the weights [outputs, _BLOCK] of a block of inputs in DOT, with their scales if SCALED."""
    POLICY: tl.constexpr = "evict_first" if ONCE else ""
    words = tl.load(words_at + block * (outputs * _WORDS), mask=inside[:, None], other=0, eviction_policy=POLICY)
    if DOT == _BFLOAT16:
        a, b, c, d = _unpack_pairs(words, scales, zeros, scales_place, zeros_place, E2M1, GROUP, SCALE, SCALED)
    else:
        scales = scales >> scales_place
        zeros = zeros >> zeros_place
        a = float_values(words, scales, zeros, 0, E2M1, GROUP, WIDTH, SCALE, SCALED).to(DOT)
        b = float_values(words, scales, zeros, 1, E2M1, GROUP, WIDTH, SCALE, SCALED).to(DOT)
        c = float_values(words, scales, zeros, 2, E2M1, GROUP, WIDTH, SCALE, SCALED).to(DOT)
        d = float_values(words, scales, zeros, 3, E2M1, GROUP, WIDTH, SCALE, SCALED).to(DOT)
    weights = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 2, 3, 1))
    return tl.reshape(weights, (inside.shape[0], _BLOCK))


@triton.constexpr_function
def _blocks_together(group, unroll):
    """Return how many blocks of a step have their scales in one piece and group, if steps and groups align."""
    if group == layout.ALL:
        return unroll
    blocks = group // layout.BLOCK
    if blocks and unroll % blocks == 0:
        return blocks
    return unroll if blocks and blocks % unroll == 0 else 1


@triton.constexpr_function
def _has_even_steps(group, width, unroll):
    """Whether a block's place in its pieces depends only on its place in a step."""
    return group <= layout.BLOCK and unroll * (layout.BLOCK // group) * width % layout.PIECE == 0


@triton.jit
def products_of_tile(
    x,  # [any, inputs]
    words,  # [blocks, outputs, _WORDS] int16, of one weight
    scales,  # [pieces, outputs] int32
    zeros,  # [pieces, outputs] int32
    output_scales,  # [outputs] float32
    rows,  # [rows] int64, of x
    held,  # [rows]: others are 0
    out,  # [tile's outputs]
    split,  # the part of the inputs
    splits,
    inputs,
    outputs,
    E2M1: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    ZEROS: tl.constexpr,
    UNROLL: tl.constexpr,  # blocks of inputs in a step
    WHOLE: tl.constexpr,  # inputs are whole steps
    ONCE: tl.constexpr,  # few other programs read the tile's words
    WAITS: tl.constexpr,
    REST: tl.constexpr,
    DOT: tl.constexpr,
):
    """Return sums [outputs, rows] float32 over a part of the inputs, scaled. Blocks are those of ``words.py``."""
    # Sums of a group are scaled, which is exact, where they are few. A single group's are scaled as the total.
    SCALED: tl.constexpr = GROUP < _BLOCK or (GROUP < _ALL and ZEROS == "with scales" and rows.shape[0] > _FEW_ROWS)
    SCALES_SUMS: tl.constexpr = GROUP < _ALL and not SCALED
    TOGETHER: tl.constexpr = _blocks_together(GROUP, UNROLL)
    steps = inputs // (_BLOCK * UNROLL)
    inside = out < outputs
    column = tl.arange(0, _BLOCK)
    words_at = words + out[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
    scales_at = scales + out
    zeros_at = zeros + out
    x_at = x + rows[None, :] * inputs + column[:, None]
    total = tl.zeros([out.shape[0], rows.shape[0]], tl.float32)
    for step in range(split * steps // splits, (split + 1) * steps // splits):
        for index in tl.static_range(UNROLL):
            block = step * UNROLL + index
            if index % TOGETHER == 0:
                block_scales, block_zeros = load_scales(
                    scales_at, zeros_at, block, inside, outputs, GROUP, WIDTH, ZEROS
                )
                part = total
                if SCALES_SUMS:
                    part = tl.zeros_like(total)
            # Constant places: with others, the compiler loads words in another order than products need.
            if _has_even_steps(GROUP, WIDTH, UNROLL):
                scales_place = place_in_piece(index, GROUP, WIDTH)
            else:
                scales_place = place_in_piece(block, GROUP, WIDTH)
            if _has_even_steps(GROUP, 1, UNROLL):
                zeros_place = zero_place(index, GROUP, ZEROS)
            else:
                zeros_place = zero_place(block, GROUP, ZEROS)
            weights = _weights_of_block(
                words_at, block_scales, block_zeros, scales_place, zeros_place, block, inside,
                outputs, E2M1, GROUP, WIDTH, SCALE, SCALED, ONCE, DOT,
            )  # fmt: skip
            values = tl.load(x_at + block * _BLOCK, mask=held[None, :], other=0.0)
            part = tl.dot(weights, values.to(DOT), part, input_precision="ieee")
            if SCALES_SUMS:
                if (index + 1) % TOGETHER == 0:
                    if DOT != _FLOAT32:
                        block_scales = _kept(block_scales)
                    total += part * scale_values(block_scales >> scales_place, SCALE)[:, None]
            else:
                total = part
        if WAITS:
            wait_for_products()
    if not WHOLE:  # the last split has the blocks that fill no step
        first = tl.where(split == splits - 1, steps * UNROLL, tl.cdiv(inputs, _BLOCK))
        for block in tl.range(first, tl.cdiv(inputs, _BLOCK), num_stages=1):
            block_scales, block_zeros = load_scales(scales_at, zeros_at, block, inside, outputs, GROUP, WIDTH, ZEROS)
            part = total
            if SCALES_SUMS:
                part = tl.zeros_like(total)
            scales_place = place_in_piece(block, GROUP, WIDTH)
            zeros_place = zero_place(block, GROUP, ZEROS)
            within = (column < inputs - block * _BLOCK)[:, None]
            weights = _weights_of_block(
                words_at, block_scales, block_zeros, scales_place, zeros_place, block, inside,
                outputs, E2M1, GROUP, WIDTH, SCALE, SCALED, ONCE, DOT,
            )  # fmt: skip
            values = tl.load(x_at + block * _BLOCK, mask=held[None, :] & within, other=0.0)
            part = tl.dot(weights, values.to(DOT), part, input_precision="ieee")
            if SCALES_SUMS:
                total += part * scale_values(block_scales >> scales_place, SCALE)[:, None]
            else:
                total = part
            if WAITS:
                wait_for_products()
    factor = tl.load(output_scales + out, mask=inside, other=0.0) * REST
    if GROUP == _ALL:
        factor *= scale_values(tl.load(scales_at, mask=inside, other=0), SCALE)
    return total * factor[:, None]


def form_options(form: FourBitForm, inputs: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants by which kernels know a form, for products with activations in ``dtype``."""
    interpreted = triton.knobs.runtime.interpret  # numpy, in which it multiplies, has no bfloat16
    zeros = "with scales" if form.has_pairs(inputs) else "separate" if form.has_zeros else "none"
    return {
        "E2M1": form.is_e2m1,
        "GROUP": form.group if form.is_e2m1 or form.group < inputs else layout.ALL,
        "WIDTH": layout.PIECE if form.has_pairs(inputs) else form.scale_dtype.itemsize,
        "SCALE": SCALE_NAMES[form.scale_dtype],
        "ZEROS": zeros,
        "REST": REST.get(form.scale_dtype, 1.0) if dtype == torch.bfloat16 and not interpreted else 1.0,
        "DOT": tl.float32 if interpreted else DOT[dtype],
    }
