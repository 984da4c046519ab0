"""The values of 4-bit weights in registers, and their products with rows: what all kernels of 4-bit weights share.

Weights are the left operand, which Hopper's tensor cores take from registers: at least 64 outputs, as few as 8 rows.
In bfloat16 a word of four codes becomes four values by masks, shifts and multiplications of pairs; elsewhere, and in
the interpreter, each value is computed in float32 and rounded once.

    codes × scales                     operations in bfloat16                                     exact
    E2M1 × E4M3, E2M1 × E8M0           value * 2^-126, times scale * 2^100 (E8M0: 2^110)          yes
    int4 × bfloat16                    (128 + code) - (128 + zero), times scale                   rounded once
    int4 × float16, float32            the same with a scale in two parts, high and low           rounded once
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from runner.kernels.experts.grouped_mxfp4 import must_wait, wait_for_products
from runner.kernels.experts.grouped_tiles import DOT
from runner.kernels.four_bits import words as layout

if TYPE_CHECKING:
    from runner.kernels.four_bits.weights import FourBitForm

_ALL = 1 << 30  # inputs of a group that holds all
_BFLOAT16 = tl.constexpr(tl.bfloat16)
_WORDS = tl.constexpr(layout.WORDS)
_BLOCK = tl.constexpr(layout.BLOCK)
_PART = tl.constexpr(layout.PART)
_PIECE = tl.constexpr(layout.PIECE)
_E2M1_UP = tl.constexpr(2.0**126)
_E4M3_UP = tl.constexpr(2.0**120)
_E8M0_UP = tl.constexpr(2.0**-layout.E8M0_SHIFT)

#: The part of a weight's scale that products in bfloat16 lack, by dtype.
REST = {torch.float8_e4m3fn: 2.0**26, torch.uint8: 2.0 ** (126 - layout.E8M0_SHIFT)}
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

# $5 and $6: a piece of each word's output, with the E4M3 scales of the four parts. As bfloat16 their bits are 2^-120 of
# them; twice 2^110 makes it 2^100.
_E2M1_E4M3 = tl.constexpr(
    "{.reg .b32 a, b, c, d, e, f, g, h, up, zero;"
    + _E2M1_PARTS
    + """
mov.b32 zero, 0x80008000;
mov.b32 up, 0x76807680;
shl.b32 e, $5, 4;
and.b32 e, e, 0x0FF00FF0;
shr.b32 f, $5, 4;
and.b32 f, f, 0x0FF00FF0;
shl.b32 g, $6, 4;
and.b32 g, g, 0x0FF00FF0;
shr.b32 h, $6, 4;
and.b32 h, h, 0x0FF00FF0;
fma.rn.bf16x2 e, e, up, zero;
fma.rn.bf16x2 f, f, up, zero;
fma.rn.bf16x2 g, g, up, zero;
fma.rn.bf16x2 h, h, up, zero;
fma.rn.bf16x2 e, e, up, zero;
fma.rn.bf16x2 f, f, up, zero;
fma.rn.bf16x2 g, g, up, zero;
fma.rn.bf16x2 h, h, up, zero;
prmt.b32 up, e, g, 0x5410;
fma.rn.bf16x2 $0, a, up, zero;
prmt.b32 up, f, h, 0x5410;
fma.rn.bf16x2 $1, b, up, zero;
prmt.b32 up, e, g, 0x7632;
fma.rn.bf16x2 $2, c, up, zero;
prmt.b32 up, f, h, 0x7632;
fma.rn.bf16x2 $3, d, up, zero;
}"""
)

# $5 and $6: the low half of each has the two E8M0 scales of an output, as exponents of bfloat16.
_E2M1_E8M0 = tl.constexpr(
    "{.reg .b32 a, b, c, d, e, f, zero;"
    + _E2M1_PARTS
    + """
mov.b32 zero, 0x80008000;
prmt.b32 e, $5, $6, 0x5410;
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

# Two words in $4: eight codes less their zeros. $5 and $6: -(128 + zero) of parts 0 and 1, and of 2 and 3.
_INT4_PARTS = """
mov.b32 one, 0x3F803F80;
mov.b32 zero, 0x80008000;
and.b32 a, $4, 0x000F000F;
or.b32 a, a, 0x43004300;
shr.b32 b, $4, 4;
and.b32 b, b, 0x000F000F;
or.b32 b, b, 0x43004300;
shr.b32 c, $4, 8;
and.b32 c, c, 0x000F000F;
or.b32 c, c, 0x43004300;
shr.b32 d, $4, 12;
and.b32 d, d, 0x000F000F;
or.b32 d, d, 0x43004300;
fma.rn.bf16x2 a, a, one, $5;
fma.rn.bf16x2 b, b, one, $5;
fma.rn.bf16x2 c, c, one, $6;
fma.rn.bf16x2 d, d, one, $6;
"""
_INT4_UNSCALED = tl.constexpr(
    "{.reg .b32 a, b, c, d, one, zero;" + _INT4_PARTS + "mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d;}"
)
# $7 and $8: the scales.
_INT4_SCALED = tl.constexpr(
    "{.reg .b32 a, b, c, d, one, zero;"
    + _INT4_PARTS
    + """
fma.rn.bf16x2 $0, a, $7, zero;
fma.rn.bf16x2 $1, b, $7, zero;
fma.rn.bf16x2 $2, c, $8, zero;
fma.rn.bf16x2 $3, d, $8, zero;
}"""
)
# $9 and $10: what bfloat16 leaves of the scales.
_INT4_SCALED_TWICE = tl.constexpr(
    "{.reg .b32 a, b, c, d, e, one, zero;"
    + _INT4_PARTS
    + """
fma.rn.bf16x2 e, a, $9, zero;
fma.rn.bf16x2 $0, a, $7, e;
fma.rn.bf16x2 e, b, $9, zero;
fma.rn.bf16x2 $1, b, $7, e;
fma.rn.bf16x2 e, c, $10, zero;
fma.rn.bf16x2 $2, c, $8, e;
fma.rn.bf16x2 e, d, $10, zero;
fma.rn.bf16x2 $3, d, $8, e;
}"""
)


@triton.jit
def scale_values(bits, SCALE: tl.constexpr):
    """Return float32 scales of the low bits of int32 numbers."""
    if SCALE == "e4m3":
        values = ((bits & 0xFF) << 20).to(tl.float32, bitcast=True) * _E4M3_UP
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
def piece_bits(at, block, inside, OUT: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Return the bits [outputs] int32 of numbers of WIDTH bytes for a block of inputs, the first in the low bits."""
    if _BLOCK // GROUP * WIDTH == _PIECE:  # a piece per block
        bits = tl.load(at + block * OUT, mask=inside, other=0)
    else:
        first = block * _BLOCK // GROUP * WIDTH
        bits = tl.load(at + first // _PIECE * OUT, mask=inside, other=0) >> (first % _PIECE * 8)
    return bits


@triton.jit
def _spread(row, like):
    """Return numbers [outputs] as bfloat16 [outputs, words]."""
    return tl.broadcast_to(row.to(tl.bfloat16)[:, None], like.shape)


@triton.jit
def _unpack_pairs(
    words, scales, zeros, E2M1: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, SCALED: tl.constexpr
):
    """Return the four values of each word in bfloat16, as the module says; without REST's factor."""
    WIDTH: tl.constexpr = 16  # bits of a scale of int4 in a piece that has two
    if E2M1:
        if SCALE == "e4m3":
            CODE: tl.constexpr = _E2M1_E4M3
        else:
            CODE: tl.constexpr = _E2M1_E8M0
        a, b, c, d = tl.inline_asm_elementwise(
            CODE,
            "=r,=r,=r,=r,r,r,r",
            [words, tl.broadcast_to(scales[:, None], words.shape)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        zero = ((zeros & 0x7F) | 0xC300).to(tl.int16).to(tl.bfloat16, bitcast=True)
        second_zero = zero
        if GROUP < _BLOCK:
            second_zero = ((zeros >> 8 & 0x7F) | 0xC300).to(tl.int16).to(tl.bfloat16, bitcast=True)
        zero = _spread(zero, words)
        second_zero = _spread(second_zero, words)
        if not SCALED:
            a, b, c, d = tl.inline_asm_elementwise(
                _INT4_UNSCALED,
                "=r,=r,=r,=r,r,r,r",
                [words, zero, second_zero],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
        else:
            scale = scale_values(scales, SCALE)
            second = scale
            if GROUP < _BLOCK:
                second = scale_values(scales >> WIDTH, SCALE)
            high = scale.to(tl.bfloat16)
            second_high = second.to(tl.bfloat16)
            if SCALE == "bfloat16":
                a, b, c, d = tl.inline_asm_elementwise(
                    _INT4_SCALED,
                    "=r,=r,=r,=r,r,r,r,r,r",
                    [words, zero, second_zero, _spread(high, words), _spread(second_high, words)],
                    dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                    is_pure=True,
                    pack=2,
                )
            else:
                low = scale - high.to(tl.float32)
                second_low = second - second_high.to(tl.float32)
                a, b, c, d = tl.inline_asm_elementwise(
                    _INT4_SCALED_TWICE,
                    "=r,=r,=r,=r,r,r,r,r,r,r,r",
                    [
                        words,
                        zero,
                        second_zero,
                        _spread(high, words),
                        _spread(second_high, words),
                        _spread(low, words),
                        _spread(second_low, words),
                    ],
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
    """Return part PLACE of each word [outputs, words] in float32, by bits [outputs] of ``piece_bits``."""
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
def _add_block(
    total,  # [outputs, rows]
    words_at,  # [outputs, _WORDS], of the first block
    scales_at,  # [outputs]
    zeros_at,  # [outputs]
    x_at,  # [_BLOCK, rows]
    block,
    inside,  # [outputs]
    held,  # [_BLOCK or 1, rows]
    OUT: tl.constexpr,
    E2M1: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ONCE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Add the products of a block of inputs."""
    BLOCK_OUT: tl.constexpr = total.shape[0]
    POLICY: tl.constexpr = "evict_first" if ONCE else ""
    words = tl.load(words_at + block * (OUT * _WORDS), mask=inside[:, None], other=0, eviction_policy=POLICY)
    scales = tl.full([BLOCK_OUT], 0, tl.int32)
    if SCALED:
        scales = piece_bits(scales_at, block, inside, OUT, GROUP, WIDTH)
    zeros = tl.full([BLOCK_OUT], 0x0808, tl.int32)
    if HAS_ZEROS:
        zeros = piece_bits(zeros_at, block, inside, OUT, GROUP, 1)
    if DOT == _BFLOAT16:
        a, b, c, d = _unpack_pairs(words, scales, zeros, E2M1, GROUP, SCALE, SCALED)
    else:
        a = float_values(words, scales, zeros, 0, E2M1, GROUP, WIDTH, SCALE, SCALED).to(DOT)
        b = float_values(words, scales, zeros, 1, E2M1, GROUP, WIDTH, SCALE, SCALED).to(DOT)
        c = float_values(words, scales, zeros, 2, E2M1, GROUP, WIDTH, SCALE, SCALED).to(DOT)
        d = float_values(words, scales, zeros, 3, E2M1, GROUP, WIDTH, SCALE, SCALED).to(DOT)
    weights = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 2, 3, 1))
    values = tl.load(x_at + block * _BLOCK, mask=held, other=0.0)
    return tl.dot(tl.reshape(weights, (BLOCK_OUT, _BLOCK)), values.to(DOT), total, input_precision="ieee")


@triton.jit
def products_of_tile(
    x,  # [any, IN]
    words,  # [blocks, OUT, _WORDS] int16, of one weight
    scales,  # [pieces, OUT] int32
    zeros,  # [pieces, OUT] int32, read if HAS_ZEROS
    output_scales,  # [OUT] float32
    rows,  # [rows] int64, of x
    held,  # [rows]: others are 0
    out,  # [outputs]
    split,  # the part of the inputs
    splits,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    E2M1: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    UNROLL: tl.constexpr,  # blocks of inputs in a step
    ONCE: tl.constexpr,  # no other program reads the tile's words
    WAITS: tl.constexpr,
    REST: tl.constexpr,
    DOT: tl.constexpr,
):
    """Return sums [outputs, rows] float32 over a part of the inputs, scaled. Blocks are those of ``words.py``."""
    BLOCKS: tl.constexpr = (IN + _BLOCK - 1) // _BLOCK
    FULL: tl.constexpr = IN // _BLOCK
    STEPS: tl.constexpr = FULL // UNROLL
    SCALED: tl.constexpr = E2M1 or GROUP < IN  # else sums are scaled
    inside = out < OUT
    column = tl.arange(0, _BLOCK)
    words_at = words + out[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
    scales_at = scales + out
    zeros_at = zeros + out
    x_at = x + rows[None, :] * IN + column[:, None]
    total = tl.zeros([out.shape[0], rows.shape[0]], tl.float32)
    for step in range(STEPS * split // splits, STEPS * (split + 1) // splits):
        for part in tl.static_range(UNROLL):
            total = _add_block(
                total, words_at, scales_at, zeros_at, x_at, step * UNROLL + part, inside, held[None, :],
                OUT, E2M1, GROUP, WIDTH, SCALE, SCALED, HAS_ZEROS, ONCE, DOT,
            )  # fmt: skip
        if WAITS:
            wait_for_products()
    if STEPS * UNROLL < BLOCKS:  # noqa: SIM102 (one is decided by the compiler)
        if split == splits - 1:
            for block in tl.static_range(STEPS * UNROLL, BLOCKS):
                within = (column < IN - block * _BLOCK)[:, None]
                total = _add_block(
                    total, words_at, scales_at, zeros_at, x_at, block, inside, held[None, :] & within,
                    OUT, E2M1, GROUP, WIDTH, SCALE, SCALED, HAS_ZEROS, ONCE, DOT,
                )  # fmt: skip
            if WAITS:
                wait_for_products()
    factor = tl.load(output_scales + out, mask=inside, other=0.0) * REST
    if not SCALED:
        factor *= scale_values(tl.load(scales_at, mask=inside, other=0), SCALE)
    return total * factor[:, None]


def form_options(form: FourBitForm, inputs: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants by which kernels know a form, for products with activations in ``dtype``."""
    interpreted = triton.knobs.runtime.interpret  # numpy, in which it multiplies, has no bfloat16
    return {
        "E2M1": form.is_e2m1,
        "GROUP": form.group if form.is_e2m1 or form.group < inputs else _ALL,
        "WIDTH": form.scale_dtype.itemsize,
        "SCALE": SCALE_NAMES[form.scale_dtype],
        "HAS_ZEROS": form.has_zeros,
        "WAITS": must_wait(),
        "REST": REST.get(form.scale_dtype, 1.0) if dtype == torch.bfloat16 and not interpreted else 1.0,
        "DOT": tl.float32 if interpreted else DOT[dtype],
    }
