"""The product of one token with a weight: all that matters is how fast the weight is read.

Measured on an H200 (bfloat16, µs) with sizes tuned for each shape, of which those below are the nearest single rule:
all products of one layer of Llama 8B, with the norms and the activation between them, take 102 where reading the
weights at the speed of a device copy would take 101; of Qwen3 0.6B, 14. cuBLAS (CUDA 13.0) takes 118 and 32 for the
products alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.kernels.chain import chained, wait_for_predecessor

_ROWS = 4  # of the weight per program
_CHUNKS = (2048, 1024, 512, 256)  # values of a row that a program reads at a time
_CHUNK_PER_WARP = 256


@triton.jit
def _gemv_kernel(
    x, weight, y, out_features, IN: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, CHAINED: tl.constexpr
):
    """y[n] = sum over k of weight[n, k] * x[k], in float32. A program per ROWS outputs."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (row < out_features)[:, None]
    column = tl.arange(0, CHUNK)
    at = weight + row[:, None].to(tl.int64) * IN + column[None, :]
    # Weights are read once per step: they shall not push what is read again out of the cache.
    weights = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_predecessor(CHAINED)
    total = weights.to(tl.float32) * tl.load(x + column).to(tl.float32)[None, :]
    for begin in range(CHUNK, IN, CHUNK):
        values = tl.load(x + begin + column).to(tl.float32)
        weights = tl.load(at + begin, mask=mask, other=0.0, eviction_policy="evict_first")
        total += weights.to(tl.float32) * values[None, :]
    tl.store(y + row, tl.sum(total, axis=1).to(y.dtype.element_ty), mask=row < out_features)


def fits(weight: Tensor) -> bool:
    """Whether ``gemv`` takes this weight [out_features, in_features]."""
    return weight.shape[1] % _CHUNKS[-1] == 0


def gemv(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """y [1, out_features] from x [1, in_features] and weight [out_features, in_features], contiguous; in ``out`` where
    it is given."""
    out_features, in_features = weight.shape
    y = torch.empty(1, out_features, dtype=x.dtype, device=x.device) if out is None else out
    chunk = next(size for size in _CHUNKS if in_features % size == 0)
    _gemv_kernel[(triton.cdiv(out_features, _ROWS),)](
        x,
        weight,
        y,
        out_features,
        IN=in_features,
        ROWS=_ROWS,
        CHUNK=chunk,
        num_warps=chunk // _CHUNK_PER_WARP,
        **chained(y),
    )
    return y
