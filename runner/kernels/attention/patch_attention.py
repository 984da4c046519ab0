"""Full attention among the patches of one image, and their rotation, for 16-bit dtypes (arXiv 2307.08691).

Towers have heads of 72 or 80 values, which other kernels compute as 96 or 128. Here a head is two products: of the
largest power of two, and of the rest, padded to 16.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROTATED = 8  # patches of a program
_LEAST = 16  # columns of a tensor core product
_OPTIONS: dict[str, Any] = {"BLOCK_Q": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}


@triton.jit
def _rotate_kernel(
    q,  # [patches, HEADS, 2 * HALF], changed in place, as k
    k,
    token_stride,
    head_stride,
    cos,  # [patches, …] float32, HALF of each row are read
    sin,
    angle_stride,
    patches,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (patches / ROWS, 2): the second one is for k."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_HALF)
    mask = (rows < patches)[:, None] & (columns < HALF)[None, :]
    angles = rows[:, None] * angle_stride + columns[None, :]
    c = tl.load(cos + angles, mask=mask, other=0.0)
    s = tl.load(sin + angles, mask=mask, other=0.0)
    at = rows.to(tl.int64)[:, None] * token_stride + columns[None, :]
    at += q if tl.program_id(1) == 0 else k
    for head in range(HEADS):
        here = at + head * head_stride
        low = tl.load(here, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(here + HALF, mask=mask, other=0.0).to(tl.float32)
        tl.store(here, (low * c - high * s).to(q.dtype.element_ty), mask=mask)
        tl.store(here + HALF, (high * c + low * s).to(q.dtype.element_ty), mask=mask)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate q and k [patches, heads, head_dim] in place, in float32; both have the same strides.

    cos, sin: [patches, head_dim] float32, whose halves are alike.
    """
    patches, heads, head_dim = q.shape
    assert q.stride() == k.stride()
    assert q.stride(2) == 1
    half = head_dim // 2
    _rotate_kernel[(triton.cdiv(patches, _ROTATED), 2)](
        q,
        k,
        q.stride(0),
        q.stride(1),
        cos,
        sin,
        cos.stride(0),
        patches,
        HEADS=heads,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        ROWS=_ROTATED,
        num_warps=4,
    )


@triton.jit
def _attend_block(
    q_low, q_high, top, total, low, high, k, v, keys, low_columns, high_columns, in_high, stride, patches, scale,
    HIGH: tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """Add ``keys`` [BLOCK_K] to the results of the queries."""
    at = keys[:, None] * stride
    if MASKED:
        held = (keys < patches)[:, None]
        k_low = tl.load(k + at + low_columns[None, :], mask=held, other=0.0).to(DOT)
        v_low = tl.load(v + at + low_columns[None, :], mask=held, other=0.0).to(DOT)
    else:
        k_low = tl.load(k + at + low_columns[None, :]).to(DOT)
        v_low = tl.load(v + at + low_columns[None, :]).to(DOT)
    scores = tl.dot(q_low, tl.trans(k_low))
    if HIGH > 0:
        mask = in_high[None, :]
        if MASKED:
            mask = mask & held
        k_high = tl.load(k + at + high_columns[None, :], mask=mask, other=0.0).to(DOT)
        v_high = tl.load(v + at + high_columns[None, :], mask=mask, other=0.0).to(DOT)
        scores = tl.dot(q_high, tl.trans(k_high), scores)
    if MASKED:
        scores = tl.where((keys < patches)[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
    shrunk = tl.exp2(top - new_top)
    shares = tl.exp2(scores * scale - new_top[:, None])
    total = total * shrunk + tl.sum(shares, axis=1)
    low = tl.dot(shares.to(DOT), v_low, low * shrunk[:, None])
    if HIGH > 0:
        high = tl.dot(shares.to(DOT), v_high, high * shrunk[:, None])
    return new_top, total, low, high


@triton.jit
def _attend_kernel(
    q,  # [patches, heads, DIM]
    k,
    v,
    token_stride,  # of q, k and v
    head_stride,
    out,  # [patches, heads, DIM], dense
    patches,
    scale,  # with log2(e)
    DIM: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
):
    """Grid (patches / BLOCK_Q, heads)."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    held = (rows < patches)[:, None]
    low_columns = tl.arange(0, LOW)
    high_columns = LOW + tl.arange(0, HIGH if HIGH > 0 else 1)
    in_high = high_columns < DIM
    q += head * head_stride
    k += head * head_stride
    v += head * head_stride
    at = rows[:, None] * token_stride
    q_low = tl.load(q + at + low_columns[None, :], mask=held, other=0.0).to(DOT)
    q_high = q_low
    high = tl.zeros((BLOCK_Q, 1), tl.float32)
    if HIGH > 0:
        q_high = tl.load(q + at + high_columns[None, :], mask=held & in_high[None, :], other=0.0).to(DOT)
        high = tl.zeros((BLOCK_Q, HIGH), tl.float32)
    low = tl.zeros((BLOCK_Q, LOW), tl.float32)
    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    whole = patches // BLOCK_K * BLOCK_K
    for begin in range(0, whole, BLOCK_K):
        keys = begin + tl.arange(0, BLOCK_K)
        top, total, low, high = _attend_block(
            q_low, q_high, top, total, low, high, k, v, keys, low_columns, high_columns, in_high, token_stride, patches,
            scale, HIGH=HIGH, MASKED=False, DOT=DOT
        )  # fmt: skip
    if whole < patches:
        keys = whole + tl.arange(0, BLOCK_K)
        top, total, low, high = _attend_block(
            q_low, q_high, top, total, low, high, k, v, keys, low_columns, high_columns, in_high, token_stride, patches,
            scale, HIGH=HIGH, MASKED=True, DOT=DOT
        )  # fmt: skip
    heads = tl.num_programs(1)
    to = out + (rows.to(tl.int64)[:, None] * heads + head) * DIM
    shares = 1.0 / total[:, None]
    tl.store(to + low_columns[None, :], (low * shares).to(out.dtype.element_ty), mask=held)
    if HIGH > 0:
        mask = held & in_high[None, :]
        tl.store(to + high_columns[None, :], (high * shares).to(out.dtype.element_ty), mask=mask)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Let all patches attend to each other: [patches, heads, head_dim] each, with the same strides; the result, dense.

    ``options``: tiles, warps and stages in place of those that are the fastest on an H200.
    """
    patches, heads, head_dim = q.shape
    assert q.stride() == k.stride() == v.stride()
    assert q.stride(2) == 1
    out = q.new_empty(patches, heads, head_dim)
    low = 1 << (head_dim.bit_length() - 1)
    high = head_dim - low
    options = {**_OPTIONS, **options}
    _attend_kernel[(triton.cdiv(patches, options["BLOCK_Q"]), heads)](
        q,
        k,
        v,
        q.stride(0),
        q.stride(1),
        out,
        patches,
        math.log2(math.e) / math.sqrt(head_dim),
        DIM=head_dim,
        LOW=low,
        HIGH=max(_LEAST, triton.next_power_of_2(high)) if high else 0,
        # numpy, in which the interpreter multiplies, has no bfloat16
        DOT=tl.float32 if triton.knobs.runtime.interpret else _DOT[q.dtype],
        **options,
    )
    return out


_DOT = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
