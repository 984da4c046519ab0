"""The product of one token with a weight; its time is the time to read the weight.

A program reads the first chunk of its rows before it waits for its input, while the kernel before it still runs. So
many small programs are faster than few large ones. Measured on an H200 (bfloat16, µs): the products of one layer of
Llama 8B, with the norms and the activation between them, by tensor shards:

    rows, values at a time, warps     1 shard     2      4
    4, the most of 2048 … 256 that divides, 1 per 256
                                        114.9   64.1   38.7
    4, 1024, 4                          106.9   59.5   33.4
    the best of each product            106.5   57.9   33.1
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.kernels.dependent_launch import pdl_options, wait_for_predecessor

_ROWS = 4  # rows of the weight per program
_CHUNK = 1024  # values of a row that a program reads at a time
_WARPS = 4
_ALIGNED = 8  # values: 16 bytes, one load of a thread


@triton.jit
def _gemv_kernel(
    x, weight, y, out_features, IN: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """y[n] = sum over k of weight[n, k] * x[k], in float32. A program per ROWS outputs."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = (row < out_features)[:, None]
    column = tl.arange(0, CHUNK)
    at = weight + row[:, None].to(tl.int64) * IN + column[None, :]
    # Weights are read once per step, so they must not evict data that is read again.
    mask = row_mask & (column < IN)[None, :]
    weights = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_predecessor(PDL)
    total = weights.to(tl.float32) * tl.load(x + column, mask=column < IN, other=0.0).to(tl.float32)[None, :]
    for begin in range(CHUNK, IN, CHUNK):
        inside = begin + column < IN
        values = tl.load(x + begin + column, mask=inside, other=0.0).to(tl.float32)
        mask = row_mask & inside[None, :]
        weights = tl.load(at + begin, mask=mask, other=0.0, eviction_policy="evict_first")
        total += weights.to(tl.float32) * values[None, :]
    tl.store(y + row, tl.sum(total, axis=1).to(y.dtype.element_ty), mask=row < out_features)


def fits(weight: Tensor) -> bool:
    """Whether ``gemv`` supports a weight [out_features, in_features]."""
    return weight.shape[1] % _ALIGNED == 0


def gemv(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Return x Wᵀ [1, out_features], in ``out`` if given; x [1, in_features] and weight are contiguous."""
    out_features, in_features = weight.shape
    y = torch.empty(1, out_features, dtype=x.dtype, device=x.device) if out is None else out
    _gemv_kernel[(triton.cdiv(out_features, _ROWS),)](
        x, weight, y, out_features, IN=in_features, ROWS=_ROWS, CHUNK=_CHUNK, num_warps=_WARPS, **pdl_options(y)
    )
    return y
