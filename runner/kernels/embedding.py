"""Embedding rows of a tensor shard's range of the vocabulary. The plain form is in ``vocabulary.py``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # values of a row per program


@triton.jit
def _embed_kernel(ids, table, out, first, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (tokens, parts of a row)."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + token).to(tl.int64) - first
    row_size = tl.where((row >= 0) & (row < rows), SIZE, 0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(table + row * SIZE + column, mask=column < row_size, other=0.0)
    tl.store(out + token * SIZE + column, values.to(out.dtype.element_ty), mask=column < SIZE)


def embed(ids: Tensor, table: Tensor, first: int, rows: int, dtype: torch.dtype) -> Tensor:
    """Return rows of ``table`` [rows or more, size] as [tokens, size] in ``dtype``. Its first row is id ``first``.

    ids [tokens] outside of ``first … first + rows - 1`` yield zeros.
    """
    out = torch.empty(ids.shape[0], table.shape[1], dtype=dtype, device=table.device)
    grid = (ids.shape[0], triton.cdiv(table.shape[1], _BLOCK))
    _embed_kernel[grid](ids, table, out, first, rows, SIZE=table.shape[1], BLOCK=_BLOCK)
    return out
