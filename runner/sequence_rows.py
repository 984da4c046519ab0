"""Live sequences by row of a runner's tables, and the sequences of one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pdserve.records import NewSequence, ScheduledSequence, StepPlan
from runner.batch import RowSnapshot


@dataclass
class StepBatch:
    """The sequences of one step, by row of a runner's table, and which of them sample. On the host."""

    scheduled: tuple[ScheduledSequence, ...]
    num_decodes: int  # leading sequences that decode
    rows: NDArray[np.int32]  # [num_seqs]
    lengths: NDArray[np.int32]  # [num_seqs]: tokens of this step
    query_starts: NDArray[np.int32]  # [num_seqs + 1]
    longest: int  # tokens of this step, at most
    sampling: NDArray[np.int64]  # [logits rows]: index of the sequence; a decode has a row per token
    sampled: tuple[ScheduledSequence, ...]  # [logits rows]: the sequence
    logits_tokens: NDArray[np.int32]  # [logits rows]: the token that has these logits, among those of the step
    sample_of_row: NDArray[np.int32]  # [num_seqs]: the first sample of the sequence, -1 if there is none

    @classmethod
    def of(cls, scheduled: tuple[ScheduledSequence, ...], num_decodes: int, rows: list[int]) -> Self:
        columns = np.array([(s.num_tokens, s.num_samples) for s in scheduled], dtype=np.int64)
        lengths, samples = columns.T
        query_starts = np.zeros(len(scheduled) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        logits_rows = np.minimum(samples, 1)  # last tokens of each sequence
        logits_rows[:num_decodes] = lengths[:num_decodes]
        sampling = np.repeat(np.arange(len(scheduled)), logits_rows)
        ends = query_starts[1:] - logits_rows.cumsum()
        draws = logits_rows * samples
        return cls(
            scheduled=scheduled,
            num_decodes=num_decodes,
            rows=np.array(rows, dtype=np.int32),
            lengths=lengths.astype(np.int32),
            query_starts=query_starts,
            longest=int(lengths.max()),
            sampling=sampling,
            sampled=tuple([scheduled[index] for index in sampling.tolist()]),
            logits_tokens=(np.arange(len(sampling)) + ends[sampling]).astype(np.int32),
            sample_of_row=np.where(draws > 0, draws.cumsum() - draws, -1).astype(np.int32),
        )

    @property
    def num_seqs(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return int(self.query_starts[-1])

    @property
    def sampling_rows(self) -> NDArray[np.int32]:
        return self.rows[self.sampling]

    @cached_property
    def is_drafted(self) -> NDArray[np.bool_]:
        """Whether each sequence has drafts: [num_seqs]."""
        drafted = self.lengths > 1
        drafted[self.num_decodes :] = False
        return drafted

    @cached_property
    def has_drafts(self) -> bool:
        return bool(self.is_drafted.any())

    @cached_property
    def drafted(self) -> NDArray[np.int64]:
        """The indices of the sequences with drafts."""
        return np.flatnonzero(self.is_drafted)

    @cached_property
    def undrafted(self) -> NDArray[np.int64]:
        """The indices of the other sequences."""
        return np.flatnonzero(~self.is_drafted)

    @property
    def known(self) -> NDArray[np.int32]:
        """The tokens of each sequence that are no drafts: [num_seqs]."""
        lengths = self.lengths.copy()
        lengths[: self.num_decodes] = 1
        return lengths

    @property
    def drafts_before(self) -> NDArray[np.int64]:
        """The number of drafts behind which each logits row samples: [logits rows]."""
        return np.arange(len(self.sampling)) - np.searchsorted(self.sampling, self.sampling)

    @cached_property
    def continued(self) -> NDArray[np.int64]:
        """The indices of the sequences that sample and have no drafts: one sample continues each of them."""
        return self.sampling[~self.is_drafted[self.sampling]] if self.has_drafts else self.sampling

    @property
    def continued_sequences(self) -> tuple[ScheduledSequence, ...]:
        return tuple([self.scheduled[index] for index in self.continued]) if self.has_drafts else self.sampled


def row_snapshots(plan: StepPlan) -> tuple[RowSnapshot, ...]:
    """Return the snapshots of recurrent states amid a step, by row of its batch."""
    if not plan.state_snapshots:
        return ()
    rows = {sequence.seq: row for row, sequence in enumerate(plan.scheduled)}
    return tuple(
        RowSnapshot(rows[snapshot.seq], snapshot.num_tokens, snapshot.slot) for snapshot in plan.state_snapshots
    )


class SequenceRows(ABC):
    """Gives each live sequence a row. A row is free again as soon as its sequence is removed."""

    def __init__(self, count: int) -> None:
        self._row_of: dict[int, int] = {}
        self._free = list(range(count - 1, -1, -1))
        self._records: list[NewSequence | None] = [None] * count

    def add(self, new: NewSequence) -> int:
        """Give a sequence a row, and return the row."""
        assert new.seq not in self._row_of, f"sequence {new.seq} was added twice"
        assert self._free, "more sequences than rows"
        row = self._row_of[new.seq] = self._free.pop()
        self._records[row] = new
        return row

    @abstractmethod
    def add_blocks(self, seq: int, block_ids: tuple[int, ...]) -> None: ...

    def remove(self, seq: int) -> None:
        """Forget a sequence. An unknown one is ignored: it was never scheduled."""
        row = self._row_of.pop(seq, None)
        if row is not None:
            self._records[row] = None
            self._free.append(row)

    def rows_of(self, scheduled: tuple[ScheduledSequence, ...]) -> list[int]:
        return [self._row_of[s.seq] for s in scheduled]

    def record(self, row: int) -> NewSequence:
        record = self._records[row]
        assert record is not None
        return record
