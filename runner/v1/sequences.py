"""The state of sequences as rows of numpy arrays, so that a batch is built without a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pdserve.kv.layout import KVLayout
from pdserve.records import NewSequence
from runner.batch import RowSnapshot
from runner.sequence_rows import SequenceRows, StepBatch


@dataclass
class HostBatch(StepBatch):
    positions: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [tokens], once it has run
    state_snapshots: tuple[RowSnapshot, ...] = ()


class SequenceTable(SequenceRows):
    def __init__(self, rows: int, max_model_len: int, layout: KVLayout) -> None:
        super().__init__(rows)
        self._pages_per_block = layout.pages_per_block
        self._num_groups = layout.groups.num_groups
        max_pages = (max_model_len // layout.block_size + 1) * layout.pages_per_block
        # Untouched memory costs nothing, and most sequences are much shorter than the limit.
        self.token_ids: NDArray[np.int32] = np.zeros((rows, max_model_len + 1), dtype=np.int32)
        self.pages: NDArray[np.int32] = np.zeros((self._num_groups, rows, max_pages), dtype=np.int32)
        self.num_tokens: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self.num_computed: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self.num_pages: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self.state_slots: NDArray[np.int32] = np.zeros(rows, dtype=np.int32)  # recurrent state, if there is any

    def add(self, new: NewSequence) -> int:
        row = super().add(new)
        self.token_ids[row, : new.num_tokens] = np.frombuffer(new.token_ids, dtype=np.int32)
        self.num_tokens[row] = new.num_tokens
        self.num_computed[row] = new.num_computed
        self.num_pages[row] = 0
        self.state_slots[row] = new.state_slot
        self.add_blocks(new.seq, new.block_ids)
        return row

    def add_blocks(self, seq: int, block_ids: tuple[int, ...]) -> None:
        row = self._row_of[seq]
        per_block = self._pages_per_block
        groups = self._num_groups
        begin = int(self.num_pages[row])
        end = begin + len(block_ids) // groups * per_block
        # A group that keeps no block has page 0 there, which no attention reads.
        blocks = np.maximum(np.asarray(block_ids, dtype=np.int32), 0).reshape(-1, groups).T
        pages = blocks[:, :, None] * per_block + np.arange(per_block, dtype=np.int32)
        self.pages[:, row, begin:end] = pages.reshape(groups, -1)
        self.num_pages[row] = end

    def append(self, row: int, token_id: int) -> None:
        self.token_ids[row, self.num_tokens[row]] = token_id
        self.num_tokens[row] += 1

    def put_drafts(self, seq: int, token_ids: Sequence[int]) -> None:
        """Write drafts behind the tokens of a sequence. They do not count as tokens."""
        row = self._row_of[seq]
        at = self.num_tokens[row]
        self.token_ids[row, at : at + len(token_ids)] = token_ids

    def count_yielded(self, seq: int, token_ids: Sequence[int]) -> None:
        """Append the tokens that a decode with drafts yields, and count the tokens before them as computed."""
        row = self._row_of[seq]
        self.put_drafts(seq, token_ids)
        self.num_tokens[row] += len(token_ids)
        self.num_computed[row] += len(token_ids)
