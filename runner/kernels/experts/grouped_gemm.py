"""Products of tokens with the weights of their experts, and the sum over the experts of a token.

The rows are those of ``grouped_tiles.py``. The plain forms are in ``expert_reference.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.batch import Routing, SharedGate
from runner.kernels.device_limits import shared_memory_of
from runner.kernels.experts.grouped_tiles import (
    DOT,
    GroupedRows,
    assignments_of_tile,
    expert_of_tile,
    held_rows,
    tile_of_program,
)

_LARGE_MEMORY = 200 << 10  # bytes of shared memory, as Hopper has
_SUM_BLOCK = 1024  # values that a program sums
_TOGETHER = 8  # tiles whose programs run together
_MANY_TILES = 3  # least mean tiles per expert to run together: with two, 8,192 tokens of Qwen3-Next take 9 % longer so


@triton.jit(do_not_specialize=["count", "first_expert", "num_experts", "tiles", "together"])
def _grouped_gemm_kernel(
    x,  # [count / ROWS_PER_TOKEN, IN]
    weight,  # [num_experts, OUT, IN]
    bias,  # [num_experts, OUT], read if HAS_BIAS
    y,  # out [count, OUT]
    assignments,  # [tiles * BLOCK_ROWS] int32, read if SORTED
    experts,  # [tiles] int32
    count,
    first_expert,  # this rank's first expert, for ``experts`` if not SORTED
    num_experts,
    tiles,
    together,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS_PER_TOKEN: tl.constexpr,
    SORTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    DOT: tl.constexpr,
):
    """Grid (tiles * blocks of OUT,). Programs of ``together`` tiles share blocks of weights in the cache."""
    OUT_BLOCKS: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    tile, out_block = tile_of_program(tiles, OUT_BLOCKS, together)
    expert, has_expert = expert_of_tile(experts, tile, first_expert, num_experts, SORTED)
    if has_expert:
        held, rows = held_rows(assignments_of_tile(assignments, tile, count, SORTED, BLOCK_ROWS), count)
        column = tl.arange(0, BLOCK_IN)
        out = out_block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        inside = out < OUT
        x_at = x + (rows // ROWS_PER_TOKEN)[:, None] * IN + column[None, :]
        weight_at = weight + expert.to(tl.int64) * OUT * IN + out[None, :].to(tl.int64) * IN + column[:, None]
        total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
        for begin in range(0, IN, BLOCK_IN):
            within = column < IN - begin
            values = tl.load(x_at + begin, mask=held[:, None] & within[None, :], other=0.0)
            weights = tl.load(weight_at + begin, mask=within[:, None] & inside[None, :], other=0.0)
            total = tl.dot(values.to(DOT), weights.to(DOT), total, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias + expert.to(tl.int64) * OUT + out, mask=inside, other=0.0).to(tl.float32)[None, :]
        y_at = y + rows[:, None] * OUT + out[None, :]
        tl.store(y_at, total.to(y.dtype.element_ty), mask=held[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def _sum_kernel(
    y,  # [tokens * TOP_K, SIZE]
    weights,  # [tokens, TOP_K] float32
    experts,  # [tokens, TOP_K] int32
    shared,  # [tokens, SIZE], read if HAS_SHARED
    x,  # [tokens, SIZE], read if HAS_GATE
    gate,  # [SIZE], read if HAS_GATE
    out,  # [tokens, SIZE]
    first_expert,
    num_experts,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (tokens, blocks of SIZE)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for index in tl.static_range(TOP_K):
        expert = tl.load(experts + token * TOP_K + index) - first_expert
        is_local = (expert >= 0) & (expert < num_experts)
        size = tl.where(is_local, SIZE, 0)
        part = tl.load(y + (token * TOP_K + index) * SIZE + column, mask=column < size, other=0.0)
        total += part.to(tl.float32) * tl.load(weights + token * TOP_K + index)
    if HAS_SHARED:
        common = tl.load(shared + token * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_GATE:
            products = tl.zeros([BLOCK], tl.float32)
            for begin in range(0, SIZE, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                value = tl.load(x + token * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
                products += value * tl.load(gate + at, mask=at < SIZE, other=0.0).to(tl.float32)
            common = common / (1.0 + tl.exp(-tl.sum(products, axis=0)))
        total += common
    tl.store(out + token * SIZE + column, total.to(out.dtype.element_ty), mask=inside)


def grouped_gemm(x: Tensor, weight: Tensor, rows: GroupedRows, bias: Tensor | None = None) -> Tensor:
    """Return the product of each assignment, [tokens * top_k, out_features]; undefined for other ranks' experts.

    x is [tokens, in_features], or [tokens * top_k, in_features] with a row per assignment; weight [experts,
    out_features, in_features] and bias [experts, out_features] are of this rank's experts.
    """
    assert x.is_contiguous()
    assert weight.is_contiguous()
    count = rows.num_assignments
    _, out_features, in_features = weight.shape
    y = x.new_empty(count, out_features)
    options = _options(rows.tile_rows, out_features, in_features, x.dtype)
    grid = (rows.tiles * triton.cdiv(out_features, options["BLOCK_OUT"]),)
    if not count:
        return y
    _grouped_gemm_kernel[grid](
        x,
        weight,
        x if bias is None else bias,
        y,
        rows.assignments,
        rows.tile_experts,
        count,
        rows.local.start,
        len(rows.local),
        rows.tiles,
        # With few tiles per expert, its weights are in the cache anyway.
        _TOGETHER if count >= _MANY_TILES * len(rows.local) * rows.tile_rows else 1,
        IN=in_features,
        OUT=out_features,
        ROWS_PER_TOKEN=count // x.shape[0],
        SORTED=rows.tokens is not None,
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=rows.tile_rows,
        **options,
    )
    return y


def sum_experts(
    y: Tensor, routing: Routing, local: range, shared: Tensor | None = None, gate: SharedGate | None = None
) -> Tensor:
    """Return the weighted sum over the experts of each token, [tokens, size], plus ``shared`` [tokens, size].

    y [tokens * top_k, size] has the results of the experts in ``local``; others are left out. Computed in float32.
    """
    assert gate is None or (shared is not None and gate.inputs.is_contiguous())
    tokens, top_k = routing.experts.shape
    size = y.shape[1]
    out = y.new_empty(tokens, size)
    if tokens:
        _sum_kernel[(tokens, triton.cdiv(size, _SUM_BLOCK))](
            y,
            routing.weights,
            routing.experts,
            y if shared is None else shared,
            y if gate is None else gate.inputs,
            y if gate is None else gate.weight,
            out,
            local.start,
            len(local),
            SIZE=size,
            TOP_K=top_k,
            HAS_SHARED=shared is not None,
            HAS_GATE=gate is not None,
            BLOCK=min(_SUM_BLOCK, triton.next_power_of_2(size)),
            num_warps=4,
        )
    return out


def _options(tile_rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return tile sizes: few rows read weights, many rows compute."""
    interpreted = triton.knobs.runtime.interpret
    few = tile_rows <= 32
    exact = dtype == torch.float32  # multiplied without tensor cores, out of registers: small tiles, no pipeline
    large = tile_rows == 128 and not interpreted and shared_memory_of(torch.device("cuda")) >= _LARGE_MEMORY
    block_out = 32 if exact else 64 if few else 256 if large else 128
    block_in = 32 if exact else 128 if few else 64
    return {
        "BLOCK_OUT": min(block_out, triton.next_power_of_2(out_features)) if interpreted else block_out,
        "BLOCK_IN": min(block_in, max(16, triton.next_power_of_2(in_features))),
        # numpy, in which the interpreter multiplies, has no bfloat16.
        "DOT": tl.float32 if interpreted else DOT[dtype],
        "num_warps": 4 if tile_rows < 128 else 8,
        "num_stages": 2 if exact else 4 if few or large else 3,
    }
