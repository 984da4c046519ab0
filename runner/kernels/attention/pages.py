"""Page lists for FlashInfer: the pages of all sequences one after the other, and where each sequence begins.

FlashInfer loads some keys behind a window and masks their scores, which does not stop a NaN. Their pages may belong to
another sequence by now; the first page in the window takes their place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.batch import AttentionBatch

_PAGE_CHUNK = 1024
_ROW_CHUNK = 256


@triton.jit(do_not_specialize=["page_table_stride"])
def _list_pages_kernel(
    seq_lens,  # [rows] int32
    query_starts,  # [rows + 1] int32
    page_table,  # [rows, …] int32
    page_table_stride,
    starts,  # out [rows + 1] int32
    last_lens,  # out [rows] int32
    pages,  # out [starts[rows]] int32
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # tokens, 0 for none
    ROW_CHUNK: tl.constexpr,
    PAGE_CHUNK: tl.constexpr,
):
    """Grid (rows, chunks of the longest sequence's pages). Every program sums the page counts of earlier rows."""
    row = tl.program_id(0)
    start = 0
    for first in range(0, row, ROW_CHUNK):
        others = first + tl.arange(0, ROW_CHUNK)
        lens = tl.load(seq_lens + others, mask=others < row, other=0)
        counts = tl.maximum((lens + PAGE_SIZE - 1) // PAGE_SIZE, 1)
        start += tl.sum(tl.where(others < row, counts, 0), axis=0)
    seq_len = tl.load(seq_lens + row)
    held = (seq_len + PAGE_SIZE - 1) // PAGE_SIZE
    count = tl.maximum(held, 1)
    if tl.program_id(1) == 0:
        tl.store(starts + row + 1, start + count)
        tl.store(last_lens + row, tl.maximum(seq_len - (count - 1) * PAGE_SIZE, 1))
        if row == 0:
            tl.store(starts, 0)
    at = tl.program_id(1) * PAGE_CHUNK + tl.arange(0, PAGE_CHUNK)
    source = at
    if WINDOW > 0:
        first_position = seq_len - tl.load(query_starts + row + 1) + tl.load(query_starts + row)
        source = tl.maximum(at, tl.maximum(first_position - WINDOW + 1, 0) // PAGE_SIZE)
    page = tl.load(page_table + row.to(tl.int64) * page_table_stride + source, mask=at < held, other=0)
    tl.store(pages + start + at, page, mask=at < count)


class PageLists:
    """Buffers that keep their addresses after the widest batch, so that captured graphs may read them."""

    def __init__(self, max_rows: int, page_size: int, device: torch.device, window: int | None = None) -> None:
        """``window``: the KV cache group's, in tokens."""
        self._max_rows = max_rows
        self._page_size = page_size
        self._window = window
        self.starts = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self.last_lens = torch.ones(max_rows, dtype=torch.int32, device=device)
        self.pages = torch.zeros(0, dtype=torch.int32, device=device)

    def build(self, batch: AttentionBatch, longest: int) -> None:
        """List the pages of sequences of up to ``longest`` tokens. Rows without tokens get page 0 with one token."""
        rows, columns = batch.page_table.shape
        if self.pages.shape[0] < self._max_rows * columns:
            self.pages = self.pages.new_zeros(self._max_rows * columns)
        chunks = triton.cdiv(triton.cdiv(max(longest, 1), self._page_size), _PAGE_CHUNK)
        _list_pages_kernel[(rows, chunks)](
            batch.device_seq_lens,
            batch.device_query_starts,
            batch.page_table,
            batch.page_table.stride(0),
            self.starts,
            self.last_lens,
            self.pages,
            PAGE_SIZE=self._page_size,
            WINDOW=self._window or 0,
            ROW_CHUNK=_ROW_CHUNK,
            PAGE_CHUNK=_PAGE_CHUNK,
            num_warps=4,
        )

    def of(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return starts [rows + 1] and last page lengths [rows] of some rows; starts count from row 0 of the batch."""
        return self.starts[rows.start : rows.stop + 1], self.last_lens[rows]
