"""RMS norm of rows, with the residual sum before it. The plain form is in ``reference.py``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.kernels.dependent_launch import pdl_options, wait_for_predecessor


@triton.jit
def _norm_kernel(
    x, residual, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr
):
    """Grid (rows,). All tensors are contiguous."""
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + columns
    weights = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    row = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        row += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        rounded = row.to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=mask)
        row = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, axis=0) / SIZE + eps)
    tl.store(out + at, (row * scale * weights).to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm x [rows, size] and scale it by weight [size], computed in float32."""
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to ``residual`` in place, and return the norm of the rounded sum. All [rows, size]."""
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    assert x.is_contiguous()
    assert residual is None or residual.is_contiguous()
    rows, size = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        eps,
        SIZE=size,
        BLOCK=block,
        ADD=residual is not None,
        num_warps=min(max(block // 256, 1), 16),  # a thread loads 16 bytes of bfloat16 at once
        **pdl_options(out),
    )
    return out
