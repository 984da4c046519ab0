"""Rounding and conversion to FP8: of activations, and of keys and values for an FP8 KV cache.

``reference.py`` has the latter in torch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runner.kernels.reference import FP8_MAX

_FP8 = tl.constexpr(tl.float8e4nv)
_MAX = tl.constexpr(FP8_MAX)
_LEAST_SCALE = tl.constexpr(1e-12)  # scale of rows that are all zero
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _round_to_e4m3(values):
    """Round float32 to the nearest value of E4M3, ties to even."""
    bits = values.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # leaves three bits of the mantissa
    subnormal = (values + 24576.0) - 24576.0  # multiples of 2^-9
    return tl.where(tl.abs(values) < 0.015625, subnormal, bits.to(tl.float32, bitcast=True))


@triton.jit
def to_e4m3(values):
    """Return the nearest values of E4M3 to float32 values, which saturate."""
    if _INTERPRETED:  # Triton 3.9's interpreter neither saturates nor carries out of a mantissa that is rounded up
        values = _round_to_e4m3(tl.maximum(tl.minimum(values, _MAX), -_MAX))
    return values.to(_FP8)


@triton.jit
def rounded_to(values, DTYPE: tl.constexpr):
    """Return float32 values rounded to DTYPE, in float32."""
    if _INTERPRETED or tl.bfloat16 != DTYPE:
        return values.to(DTYPE).to(tl.float32)
    return tl.inline_asm_elementwise(  # two at once: single conversions run at a quarter of the rate
        "{.reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xFFFF0000;}",
        "=f,=f,f,f",
        [values],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def quantized_rows(values):
    """Return E4M3 of float32 values [rows, size], and the scale of each row, chosen from its largest value."""
    scale = tl.maximum(tl.max(tl.abs(values), axis=1) / _MAX, _LEAST_SCALE)
    return to_e4m3(values * (1.0 / scale)[:, None]), scale


@triton.jit
def to_cache(values, inverse_scale, DTYPE: tl.constexpr):
    """Return values in DTYPE. Only an FP8 cache has a scale; its values saturate."""
    if DTYPE == _FP8:
        values = to_e4m3(values.to(tl.float32) * inverse_scale)
    return values.to(DTYPE)


@triton.jit
def from_cache(values, scale, DTYPE: tl.constexpr):
    """Return values in DTYPE; values of an FP8 cache are multiplied by their scale."""
    if values.dtype == _FP8:
        values = values.to(tl.float32) * scale
    return values.to(DTYPE)
