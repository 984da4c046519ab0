"""Rotation of the queries and keys of a vision tower's patches."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 8  # patches of a program


@triton.jit
def _rotate_kernel(
    q,  # [patches, HEADS, 2 * HALF], as k and v; all with the same strides
    k,
    v,
    token_stride,
    head_stride,
    q_to,  # [patches, HEADS, …], as k_to and v_to
    k_to,
    v_to,
    to_token_stride,
    to_head_stride,
    cos,  # [patches, …] float32, of which HALF of each row are read
    sin,
    angle_stride,
    patches,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (patches / ROWS, 2 or 3): q, k, and perhaps v, which is copied."""
    part = tl.program_id(1)
    source = q
    target = q_to
    if part == 1:
        source = k
        target = k_to
    if part == 2:
        source = v
        target = v_to
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_HALF)
    mask = (rows < patches)[:, None] & (columns < HALF)[None, :]
    angles = rows[:, None] * angle_stride + columns[None, :]
    c = tl.where(part < 2, tl.load(cos + angles, mask=mask, other=0.0), 1.0)
    s = tl.where(part < 2, tl.load(sin + angles, mask=mask, other=0.0), 0.0)
    wide_rows = rows.to(tl.int64)[:, None]
    at = source + wide_rows * token_stride + columns[None, :]
    to = target + wide_rows * to_token_stride + columns[None, :]
    for head in range(HEADS):
        here = at + head * head_stride
        there = to + head * to_head_stride
        low = tl.load(here, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(here + HALF, mask=mask, other=0.0).to(tl.float32)
        tl.store(there, (low * c - high * s).to(q.dtype.element_ty), mask=mask)
        tl.store(there + HALF, (high * c + low * s).to(q.dtype.element_ty), mask=mask)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate q and k [patches, heads, head_dim] in place, in float32; both have the same strides.

    cos, sin: [patches, head_dim] float32, whose halves are alike.
    """
    _launch((q, k), (q, k), cos, sin)


def rotate_into(sources: tuple[Tensor, Tensor, Tensor], targets: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Write q and k, rotated as by ``rotate``, and v into ``targets`` [3, patches, heads, at least head_dim].

    Further values of a head in ``targets`` stay.
    """
    _launch(sources, tuple(targets.unbind()), cos, sin)


def _launch(sources: tuple[Tensor, ...], targets: tuple[Tensor, ...], cos: Tensor, sin: Tensor) -> None:
    q, k = sources[:2]
    patches, heads, head_dim = q.shape
    half = head_dim // 2
    assert all(x.stride() == q.stride() for x in sources)
    assert q.stride(2) == 1
    _rotate_kernel[(triton.cdiv(patches, _ROWS), len(sources))](
        q,
        k,
        sources[-1],
        q.stride(0),
        q.stride(1),
        targets[0],
        targets[1],
        targets[-1],
        targets[0].stride(0),
        targets[0].stride(1),
        cos,
        sin,
        cos.stride(0),
        patches,
        HEADS=heads,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        ROWS=_ROWS,
        num_warps=4,
    )
