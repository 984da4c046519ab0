"""RMS norm of rows, with the residual sum before it, and quantized where the next product takes FP8.

The plain form is in ``reference.py``. A quantized norm equals ``fp8_products.quantize`` of the norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.batch import Quantized
from runner.kernels.dependent_launch import pdl_options, wait_for_predecessor
from runner.kernels.products.fp8 import quantized_rows, rounded_to


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    out,
    scales,  # out [rows, SIZE / GROUP], if GROUP
    eps,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,  # values that share a scale; 0: ``out`` is not quantized
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
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
    normed = row * scale * weights
    if GROUP:
        WIDTH: tl.constexpr = BLOCK if GROUP == SIZE else GROUP
        GROUPS: tl.constexpr = SIZE // GROUP
        normed = rounded_to(normed, x.dtype.element_ty)
        values, group_scales = quantized_rows(tl.reshape(normed, (BLOCK // WIDTH, WIDTH)))
        group = tl.arange(0, BLOCK // WIDTH)
        tl.store(scales + tl.program_id(0) * GROUPS + group, group_scales, mask=group < GROUPS)
        tl.store(out + at, tl.reshape(values, (BLOCK,)), mask=mask)
    else:
        tl.store(out + at, normed.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm x [rows, size] and scale it by weight [size], computed in float32."""
    out = torch.empty_like(x)
    _launch(x, None, weight, eps, out)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to ``residual`` in place, and return the norm of the rounded sum. All [rows, size]."""
    out = torch.empty_like(x)
    _launch(x, residual, weight, eps, out)
    return out


def quantized_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, group: int) -> Quantized:
    """Do ``add_rms_norm``, or ``rms_norm`` without a residual, and quantize the norm.

    ``group`` values of a row share a scale: all of them, or a power of two.
    """
    rows, size = x.shape
    values = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, size // group, dtype=torch.float32, device=x.device)
    _launch(x, residual, weight, eps, values, scales)
    return Quantized(values, scales)


@triton.jit
def _gated_norm_kernel(
    x,  # [tokens, HEADS, SIZE]
    gate,  # [tokens, HEADS * SIZE], rows gate_stride apart
    gate_stride,
    weight,  # [SIZE]
    out,  # [tokens, HEADS * SIZE]
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Grid (tokens, blocks of heads)."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    columns = tl.arange(0, BLOCK)
    mask = (heads < HEADS)[:, None] & (columns < SIZE)[None, :]
    at = heads[:, None] * SIZE + columns[None, :]
    row = tl.load(x + token * HEADS * SIZE + at, mask=mask, other=0.0).to(tl.float32)
    gates = tl.load(gate + token * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, axis=1) / SIZE + eps)
    normed = row * scale[:, None] * tl.load(weight + columns, mask=columns < SIZE, other=0.0).to(tl.float32)[None, :]
    value = normed * gates / (1.0 + tl.exp(-gates))
    tl.store(out + token * HEADS * SIZE + at, value.to(out.dtype.element_ty), mask=mask)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rms_norm(x) * silu(gate) [tokens, heads * size] of x [tokens, heads, size], scaled by weight [size].

    gate [tokens, heads * size], with rows at any stride. Computed in float32.
    """
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    tokens, heads, size = x.shape
    block = triton.next_power_of_2(size)
    block_heads = max(1, 1024 // block)
    out = x.new_empty(tokens, heads * size)
    _gated_norm_kernel[(tokens, triton.cdiv(heads, block_heads))](
        x,
        gate,
        gate.stride(0),
        weight,
        out,
        eps,
        HEADS=heads,
        SIZE=size,
        BLOCK=block,
        BLOCK_HEADS=block_heads,
        num_warps=4,
    )
    return out


@triton.jit
def _grouped_gated_norm_kernel(
    x,  # [tokens, GROUPS * SIZE]
    gate,  # [tokens, GROUPS * SIZE], rows gate_stride apart
    gate_stride,
    weight,  # [GROUPS * SIZE], read if HAS_NORM
    out,  # out, as x
    eps,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATE_FIRST: tl.constexpr,
):
    """Grid (tokens, groups)."""
    token = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, BLOCK)
    mask = within < SIZE
    columns = tl.program_id(1) * SIZE + within
    gates = tl.load(gate + token * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    gates = gates / (1.0 + tl.exp(-gates))
    value = tl.load(x + token * GROUPS * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        if GATE_FIRST:
            value *= gates
        value *= tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
        value *= tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
        if not GATE_FIRST:
            value *= gates
    else:
        value *= gates
    tl.store(out + token * GROUPS * SIZE + columns, value.to(out.dtype.element_ty), mask=mask)


def grouped_gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, gate_first: bool, eps: float
) -> Tensor:
    """Return what ``reference.grouped_gated_norm`` does; gate [tokens, size] with rows at any stride."""
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    tokens, size = x.shape
    block = triton.next_power_of_2(size // groups)
    out = torch.empty_like(x)
    _grouped_gated_norm_kernel[(tokens, groups)](
        x,
        gate,
        gate.stride(0),
        x if weight is None else weight,
        out,
        eps,
        GROUPS=groups,
        SIZE=size // groups,
        BLOCK=block,
        HAS_NORM=weight is not None,
        GATE_FIRST=gate_first,
        num_warps=min(max(block // 256, 1), 16),
    )
    return out


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None = None
) -> None:
    assert x.is_contiguous()
    assert residual is None or residual.is_contiguous()
    rows, size = x.shape
    block = triton.next_power_of_2(size)
    _norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        out if scales is None else scales,
        eps,
        SIZE=size,
        GROUP=0 if scales is None else size // scales.shape[1],
        BLOCK=block,
        ADD=residual is not None,
        num_warps=min(max(block // 256, 1), 16),  # a thread loads 16 bytes of bfloat16 at once
        **pdl_options(out),
    )
