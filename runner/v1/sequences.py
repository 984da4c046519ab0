"""The state of sequences as rows of numpy arrays, so that a batch is built without a loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.config.parallel import DeferredMLPs
from pdserve.kv import KVLayout
from pdserve.records import NewSequence, ScheduledSequence


@dataclass(frozen=True)
class HostBatch:
    """The sequences that a step computes, as rows of the SequenceTable."""

    scheduled: tuple[ScheduledSequence, ...]
    rows: NDArray[np.int64]  # [num_seqs]
    lengths: NDArray[np.int64]  # [num_seqs]: tokens of this step
    sampling: list[int]  # indices of the sequences that sample
    deferred: DeferredMLPs

    @property
    def last_tokens(self) -> NDArray[np.int64]:
        """The last token of each sequence that samples, as an index into the tokens of the step."""
        return self.lengths.cumsum()[self.sampling] - 1

    @property
    def sampling_rows(self) -> NDArray[np.int64]:
        return self.rows[self.sampling]


class SequenceTable:
    """Sequences by row. Rows are reused; the table doubles when it is full."""

    def __init__(self, rows: int, max_model_len: int, layout: KVLayout) -> None:
        self._pages_per_block = layout.pages_per_block
        max_pages = (max_model_len // layout.block_size + 1) * layout.pages_per_block
        # Untouched memory costs nothing, and most sequences are much shorter than the limit.
        self.token_ids: NDArray[np.int32] = np.zeros((rows, max_model_len + 1), dtype=np.int32)
        self.pages: NDArray[np.int32] = np.zeros((rows, max_pages), dtype=np.int32)
        self.num_tokens: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self.num_computed: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self.num_pages: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self.records: list[NewSequence | None] = [None] * rows
        self._row_of: dict[int, int] = {}
        self._free = list(range(rows - 1, -1, -1))

    def add(self, new: NewSequence) -> None:
        assert new.seq not in self._row_of, f"sequence {new.seq} was added twice"
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._row_of[new.seq] = row
        self.records[row] = new
        self.token_ids[row, : new.num_tokens] = np.frombuffer(new.token_ids, dtype=np.int32)
        self.num_tokens[row] = new.num_tokens
        self.num_computed[row] = new.num_computed
        self.num_pages[row] = 0
        self.add_blocks(new.seq, new.block_ids)

    def remove(self, seq: int) -> None:
        """Forget a sequence. An unknown one is ignored: it was never scheduled."""
        row = self._row_of.pop(seq, None)
        if row is not None:
            self.records[row] = None
            self._free.append(row)

    def add_blocks(self, seq: int, block_ids: tuple[int, ...]) -> None:
        row = self._row_of[seq]
        per_block = self._pages_per_block
        begin = int(self.num_pages[row])
        end = begin + len(block_ids) * per_block
        pages = np.asarray(block_ids, dtype=np.int32)[:, None] * per_block + np.arange(per_block, dtype=np.int32)
        self.pages[row, begin:end] = pages.reshape(-1)
        self.num_pages[row] = end

    def rows(self, scheduled: tuple[ScheduledSequence, ...]) -> NDArray[np.int64]:
        return np.array([self._row_of[s.seq] for s in scheduled], dtype=np.int64)

    def record(self, row: int) -> NewSequence:
        record = self.records[row]
        assert record is not None
        return record

    def append(self, row: int, token_id: int) -> None:
        self.token_ids[row, self.num_tokens[row]] = token_id
        self.num_tokens[row] += 1

    def _grow(self) -> None:
        rows = len(self.records)

        def doubled(array: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate((array, np.zeros_like(array)))

        self.token_ids, self.pages = doubled(self.token_ids), doubled(self.pages)
        self.num_tokens, self.num_computed = doubled(self.num_tokens), doubled(self.num_computed)
        self.num_pages = doubled(self.num_pages)
        self.records += [None] * rows
        self._free += range(2 * rows - 1, rows - 1, -1)
