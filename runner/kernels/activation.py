"""Activations of gates and ups. The plain forms are in ``reference.py``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.kernels.dependent_launch import pdl_options, wait_for_predecessor

_BLOCK = 1024  # values per program: 8 per thread, 16 bytes at a time in bfloat16
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _sigmoid(x):
    """Return 1 / (1 + exp(-x)) of float32 by two of the GPU's approximations, each exact to 22 bits.

    Triton's exp and division take four times as many instructions, for results that are denormal or infinite.
    """
    if _INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-x))
    power = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
    )
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def silu_and_mul_values(gate, up):
    """Return silu(gate) * up of float32 values, for other kernels, too."""
    return gate * _sigmoid(gate) * up


@triton.jit
def _silu_and_mul_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (tokens, blocks of a row)."""
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    product = silu_and_mul_values(gate, up)
    tl.store(out + row * SIZE + columns, product.to(out.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [tokens, size] of gate_up [tokens, 2 * size], computed in float32."""
    assert gate_up.is_contiguous()
    tokens = gate_up.shape[0]
    size = gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, size)
    _silu_and_mul_kernel[(tokens, triton.cdiv(size, _BLOCK))](
        gate_up, out, SIZE=size, BLOCK=_BLOCK, num_warps=4, **pdl_options(out)
    )
    return out


@triton.jit
def _sigmoid_and_mul_kernel(gate, gate_stride, x, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (tokens, blocks of a row)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gates = tl.load(gate + row * gate_stride + columns, mask=mask, other=0.0)
    values = tl.load(x + row * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, (_sigmoid(gates.to(tl.float32)) * values).to(out.dtype.element_ty), mask=mask)


def sigmoid_and_mul(gate: Tensor, x: Tensor) -> Tensor:
    """Return sigmoid(gate) * x, both [tokens, size], computed in float32.

    The rows of gate may lie at any stride.
    """
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    tokens, size = x.shape
    out = torch.empty_like(x)
    _sigmoid_and_mul_kernel[(tokens, triton.cdiv(size, _BLOCK))](
        gate, gate.stride(0), x, out, SIZE=size, BLOCK=_BLOCK, num_warps=4
    )
    return out


@triton.jit
def clamped_swiglu_values(gate, up, alpha, limit):
    """Return (up + 1) * gate * sigmoid(alpha * gate) of clamped float32 values, for other kernels, too."""
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))


@triton.jit
def _clamped_swiglu_kernel(gate_up, out, alpha, limit, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (tokens, blocks of a row). Gates and ups are read together, as they alternate."""
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK
    pairs = 2 * begin + tl.arange(0, 2 * BLOCK)
    values = tl.load(gate_up + row * 2 * SIZE + pairs, mask=pairs < 2 * SIZE, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(values, (BLOCK, 2)))
    product = clamped_swiglu_values(gate, up, alpha, limit)
    columns = begin + tl.arange(0, BLOCK)
    tl.store(out + row * SIZE + columns, product.to(out.dtype.element_ty), mask=columns < SIZE)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate), as ``reference.clamped_swiglu`` describes."""
    assert gate_up.is_contiguous()
    tokens = gate_up.shape[0]
    size = gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, size)
    if tokens:
        _clamped_swiglu_kernel[(tokens, triton.cdiv(size, _BLOCK))](
            gate_up, out, alpha, limit, SIZE=size, BLOCK=_BLOCK, num_warps=4, **pdl_options(out)
        )
    return out
