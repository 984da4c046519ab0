"""Which sequence has which slot, and what the host knows of it: everything but the tokens still being computed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.records import NewSequence, ScheduledSequence
from runner.v2.state import DeviceState, Uploader


@dataclass(frozen=True)
class BatchForm:
    """What stays the same from step to step while the same sequences decode."""

    slots: NDArray[np.int32]  # [num_seqs]
    lengths: NDArray[np.int32]  # [num_seqs]: tokens of this step
    query_starts: NDArray[np.int32]  # [num_seqs + 1]
    sampling: NDArray[np.int64]  # rows that sample
    last_tokens: NDArray[np.int32]  # of the rows that sample
    draw_of_row: NDArray[np.int32]  # [num_seqs]: which of the step's draws continues the sequence, -1 for none

    @property
    def num_seqs(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return int(self.query_starts[-1])

    @property
    def every_token_samples(self) -> bool:
        return self.num_tokens == len(self.sampling)

    def sampling_of(self, scheduled: tuple[ScheduledSequence, ...]) -> tuple[ScheduledSequence, ...]:
        if len(self.sampling) == len(scheduled):
            return scheduled
        return tuple(scheduled[row] for row in self.sampling)


@dataclass(frozen=True)
class ScheduledBatch:
    """The sequences of one step, on the host."""

    form: BatchForm
    seq_lens: NDArray[np.int32]  # [num_seqs], with this step's tokens
    longest: int  # tokens of the longest sequence, with the one that this step samples


class Slots:
    """Rows of the device's state. Changes go to the uploader; a slot is free again as soon as its sequence is removed.

    That is safe while a launched step still uses the slot: whatever is written for the next owner is written by a later
    step on the same stream. And a late result belongs to the plan it was launched with, which names sequences by
    numbers that are never used again.
    """

    def __init__(self, state: DeviceState, uploader: Uploader, microbatches: int) -> None:
        """The forms of the last steps are kept, as many as there are ``microbatches`` that take turns."""
        count = state.num_tokens.shape[0]
        self._state = state
        self._uploader = uploader
        self._slot_of: dict[int, int] = {}
        self._free = list(range(count - 1, -1, -1))
        self._records: list[NewSequence | None] = [None] * count
        self.num_computed: NDArray[np.int32] = np.zeros(count, dtype=np.int32)
        self.num_tokens: NDArray[np.int32] = np.zeros(count, dtype=np.int32)  # with those being sampled
        self._num_blocks: NDArray[np.int32] = np.zeros(count, dtype=np.int32)
        self._forms: deque[tuple[tuple[ScheduledSequence, ...], BatchForm]] = deque(maxlen=microbatches)

    def __len__(self) -> int:
        return len(self._slot_of)

    def add(self, new: NewSequence) -> None:
        assert new.seq not in self._slot_of, f"sequence {new.seq} was added twice"
        assert self._free, "more sequences than slots"
        slot = self._free.pop()
        self._slot_of[new.seq] = slot
        self._forms.clear()
        self._records[slot] = new
        state, write = self._state, self._uploader.write
        self.num_computed[slot], self.num_tokens[slot], self._num_blocks[slot] = new.num_computed, new.num_tokens, 0
        write(state.offset(state.token_ids, slot, 0), np.frombuffer(new.token_ids, dtype=np.int32))
        write(state.offset(state.num_computed, slot), self.num_computed[slot : slot + 1].copy())
        write(state.offset(state.num_tokens, slot), self.num_tokens[slot : slot + 1].copy())
        self.add_blocks(new.seq, new.block_ids)

    def add_blocks(self, seq: int, block_ids: tuple[int, ...]) -> None:
        slot = self._slot_of[seq]
        first = int(self._num_blocks[slot])
        self._uploader.write(self._state.offset(self._state.blocks, slot, first), np.array(block_ids, dtype=np.int32))
        self._num_blocks[slot] += len(block_ids)

    def remove(self, seq: int) -> None:
        """Forget a sequence. One that is not known is ignored: it was never scheduled."""
        slot = self._slot_of.pop(seq, None)
        if slot is not None:
            self._records[slot] = None
            self._forms.clear()
            self._free.append(slot)

    def record(self, slot: int) -> NewSequence:
        record = self._records[slot]
        assert record is not None
        return record

    def schedule(self, scheduled: tuple[ScheduledSequence, ...]) -> ScheduledBatch:
        """Put a step together, and count its tokens and samples as done."""
        form = self._form_of(scheduled)
        self.num_computed[form.slots] += form.lengths
        seq_lens = self.num_computed[form.slots]
        known = self.num_tokens[form.slots]
        assert (seq_lens <= known).all(), "a plan schedules tokens that do not exist yet"
        self.num_tokens[form.slots[form.sampling]] += 1
        return ScheduledBatch(form, seq_lens, int(known.max()) + 1)

    def _form_of(self, scheduled: tuple[ScheduledSequence, ...]) -> BatchForm:
        """That of one of the last steps where it fits, which spares most of the work."""
        for known, form in self._forms:
            if known == scheduled:
                return form
        columns = np.array([(s.seq, s.num_tokens, s.num_samples) for s in scheduled], dtype=np.int64)
        seqs, lengths, samples = columns.T
        query_starts = np.zeros(len(scheduled) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        sampling = np.flatnonzero(samples)
        form = BatchForm(
            slots=np.array([self._slot_of[seq] for seq in seqs], dtype=np.int32),
            lengths=lengths.astype(np.int32),
            query_starts=query_starts,
            sampling=sampling,
            last_tokens=query_starts[1:][sampling] - 1,
            draw_of_row=np.where(samples > 0, samples.cumsum() - samples, -1).astype(np.int32),
        )
        self._forms.append((scheduled, form))
        return form
