"""Copy keys and values of sequences out of their pages, token after token, for kernels that read whole tiles.

Keys and values of an FP8 cache are dequantized on the way.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kv.layout import UNSCALED, KVScales
from runner.batch import AttentionBatch
from runner.kernels.products.fp8 import from_cache

TILE = 128  # tokens; each sequence begins at a multiple, and the rest of its last tile is zero
_ROW_CHUNK = 256


@triton.jit(do_not_specialize=["page_table_stride"])
def _gather_kernel(
    cache,  # [pages, KV_HEADS, 2 (K, V), PAGE_SIZE, HEAD_DIM], the last two dense
    page_stride,
    head_stride,
    v_stride,  # from K to V
    seq_lens,  # [rows] int32
    page_table,  # [rows, …] int32
    page_table_stride,
    keys,  # out [KV_HEADS, …, HEAD_DIM], heads target_stride apart
    values,
    target_stride,
    k_scale,  # scale of keys in an FP8 cache
    v_scale,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROW_CHUNK: tl.constexpr,
):
    """Grid (tiles of the longest sequence, rows, heads). Every program sums the lengths of the rows before its own."""
    row = tl.program_id(1)
    tokens = tl.program_id(0) * TILE + tl.arange(0, TILE)
    seq_len = tl.load(seq_lens + row)
    if tl.program_id(0) * TILE < seq_len:
        start = 0
        for first in range(0, row, ROW_CHUNK):
            others = first + tl.arange(0, ROW_CHUNK)
            lens = tl.load(seq_lens + others, mask=others < row, other=0)
            start += tl.sum((lens + TILE - 1) // TILE * TILE, axis=0)
        held = tokens < seq_len
        pages = tl.load(page_table + row.to(tl.int64) * page_table_stride + tokens // PAGE_SIZE, mask=held, other=0)
        head = tl.program_id(2).to(tl.int64)
        dims = tl.arange(0, HEAD_DIM)[None, :]
        at = pages.to(tl.int64) * page_stride + head * head_stride + tokens % PAGE_SIZE * HEAD_DIM
        k = tl.load(cache + at[:, None] + dims, mask=held[:, None], other=0.0)
        v = tl.load(cache + v_stride + at[:, None] + dims, mask=held[:, None], other=0.0)
        target = head * target_stride + ((start + tokens) * HEAD_DIM)[:, None] + dims
        tl.store(keys + target, from_cache(k, k_scale, keys.dtype.element_ty))
        tl.store(values + target, from_cache(v, v_scale, values.dtype.element_ty))


class GatheredKeys:
    """Memory for the gathered keys and values of one layer at a time."""

    def __init__(self, capacity: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """``capacity`` counts tokens; each sequence is rounded up to whole tiles."""
        self.capacity = capacity // TILE * TILE
        self._memory = torch.zeros(2, kv_heads, self.capacity, head_dim, dtype=dtype, device=device)

    def plan(self, batch: AttentionBatch, first: int) -> NDArray[np.int32]:
        """Take the sequences from row ``first`` on. Return where each begins, and where the last one ends: [rows + 1].

        They fit unless the end is above ``capacity``.
        """
        seq_lens = batch.seq_lens[first:]
        starts = np.zeros(len(seq_lens) + 1, dtype=np.int32)
        np.cumsum(-(-seq_lens // TILE) * TILE, out=starts[1:])
        self._seq_lens = batch.device_seq_lens[first : len(batch.seq_lens)]
        self._page_tables = [group_batch.page_table[first : len(batch.seq_lens)] for group_batch in batch.by_group]
        self._longest = int(seq_lens.max())
        self._total = int(starts[-1])
        return starts

    def gather(self, cache: Tensor, scales: KVScales = UNSCALED, group: int = 0) -> tuple[Tensor, Tensor]:
        """Return keys and values of the planned sequences, [tokens, kv_heads, head_dim] each, until the next call.

        cache: the view [pages, kv_heads, 2, page_size, head_dim] of a layer of ``group``, which has no window; head_dim
        a power of two. ``scales`` belong to an FP8 cache.
        """
        page_table = self._page_tables[group]
        _, kv_heads, _, page_size, head_dim = cache.shape
        assert self._total <= self.capacity
        assert cache.stride()[3:] == (head_dim, 1)
        keys, values = self._memory
        _gather_kernel[(triton.cdiv(self._longest, TILE), len(self._seq_lens), kv_heads)](
            cache,
            *cache.stride()[:3],
            self._seq_lens,
            page_table,
            page_table.stride(0),
            keys,
            values,
            keys.stride(0),
            scales.k,
            scales.v,
            HEAD_DIM=head_dim,
            PAGE_SIZE=page_size,
            TILE=TILE,
            ROW_CHUNK=_ROW_CHUNK,
            num_warps=8,
        )
        return keys[:, : self._total].transpose(0, 1), values[:, : self._total].transpose(0, 1)
