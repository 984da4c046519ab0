"""Sequences by slot, as far as the host knows them: all but the tokens that are still being computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pdserve.records import Drafts, NewSequence, StepPlan
from runner.sequence_rows import SequenceRows, row_snapshots
from runner.v2.device_state import DeviceState, StagedWrites
from runner.v2.input_batch import HAS_DRAFTS, BatchIndices, InputBatch, StepState
from runner.v2.sampling_metadata import DeviceSamplingRow


class RequestStates(SequenceRows):
    """Sequences by slot, which is a row of the device's state.

    A slot may be reused while a launched step still uses it: a later step on the same stream applies the writes for its
    next owner. A late result belongs to the plan of its launch, whose sequence numbers are never reused.
    """

    def __init__(self, state: DeviceState, writes: StagedWrites, microbatches: int, is_last_stage: bool) -> None:
        """The indices of as many batches are kept as alternate: ``microbatches``, and one with a chunk of a prompt."""
        count = state.num_tokens.shape[0]
        super().__init__(count)
        self._state = state
        self._writes = writes
        self._is_last_stage = is_last_stage
        self.num_computed: NDArray[np.int32] = np.zeros(count, dtype=np.int32)
        self.num_tokens: NDArray[np.int32] = np.zeros(count, dtype=np.int32)  # including tokens being sampled
        self._num_blocks: NDArray[np.int32] = np.zeros(count, dtype=np.int32)
        self._state_slots: NDArray[np.int32] = np.zeros(count, dtype=np.int32)  # recurrent state, if there is any
        self._recent: deque[BatchIndices] = deque(maxlen=microbatches + 1)

    def __len__(self) -> int:
        return len(self._row_of)

    def add(self, new: NewSequence) -> int:
        slot = super().add(new)
        self._recent.clear()
        state = self._state
        write = self._writes.write
        self.num_computed[slot] = new.num_computed
        self.num_tokens[slot] = new.num_tokens
        self._num_blocks[slot] = 0
        self._state_slots[slot] = new.state_slot
        write(state.token_offset(slot, 0), np.frombuffer(new.token_ids, dtype=np.int32))
        write(state.num_computed_offset(slot), self.num_computed[slot : slot + 1].copy())
        write(state.num_tokens_offset(slot), self.num_tokens[slot : slot + 1].copy())
        self.add_blocks(new.seq, new.block_ids)
        return slot

    def add_blocks(self, seq: int, block_ids: tuple[int, ...]) -> None:
        slot = self._row_of[seq]
        first = int(self._num_blocks[slot])
        offset = self._state.block_offset(slot, first)
        # A group that keeps no block has block 0 there, which no attention reads.
        self._writes.write(offset, np.maximum(np.array(block_ids, dtype=np.int32), 0))
        self._num_blocks[slot] += len(block_ids)

    def remove(self, seq: int) -> None:
        super().remove(seq)
        self._recent.clear()

    def schedule(self, plan: StepPlan) -> InputBatch:
        """Send a batch with all staged writes, and count its tokens and samples as done."""
        if plan.drafts:
            self._write_drafts(plan.drafts)
        indices = self._indices_of(plan)
        seq_lens = self.num_computed[indices.rows] + indices.lengths
        lengths = self.num_tokens[indices.rows]  # tokens that exist, and drafts
        if plan.drafts:
            lengths[indices.drafted] += indices.lengths[indices.drafted] - 1
            counted = indices.undrafted
            self.num_computed[indices.rows[counted]] = seq_lens[counted]
            self.num_tokens[indices.rows[indices.continued]] += 1
        else:
            self.num_computed[indices.rows] = seq_lens
            self.num_tokens[indices.sampling_rows] += 1
        assert (seq_lens <= lengths).all(), "a plan schedules tokens that do not exist yet"
        num_blocks = self._num_blocks[indices.rows]
        arrays = StepState(
            slots=indices.rows,
            query_starts=indices.query_starts,
            sample_of_row=indices.sample_of_row,
            logits_tokens=indices.logits_tokens,
            state_slots=self._state_slots[indices.rows],
            num_blocks=num_blocks,
        )
        sent = self._writes.send(*arrays)
        self._writes.apply(sent, self._state)
        return InputBatch(
            indices=indices,
            seq_lens=seq_lens,
            longest=int(lengths.max()) + 1,
            sent=sent,
            at=StepState(*sent.arrays_at),
            num_blocks=num_blocks,
            state_snapshots=row_snapshots(plan),
        )

    def sampling_rows(self, indices: BatchIndices) -> list[DeviceSamplingRow]:
        """Return each token that a batch samples."""
        rows: list[DeviceSamplingRow] = []
        every = zip(indices.sampling_rows.tolist(), indices.sampled, indices.drafts_before.tolist(), strict=True)
        for row, (slot, sequence, before) in enumerate(every):
            record = self.record(slot)
            choices = sequence.sampled_choices(record.choice)
            rows += [DeviceSamplingRow(row, slot, record.sampling, c, record.prompt_len, before) for c in choices]
        return rows

    def _write_drafts(self, every: Sequence[Drafts]) -> None:
        """Append the tokens that the last decodes yielded, count them, and write drafts behind them."""
        state = self._state
        writes = self._writes
        slots = np.array([self._row_of[drafts.seq] for drafts in every])
        tokens = [(*drafts.yielded, *drafts.token_ids) for drafts in every]
        destinations = state.token_offset(slots, self.num_tokens[slots])
        writes.write_each(
            destinations.tolist(), map(len, tokens), np.fromiter(chain.from_iterable(tokens), dtype=np.int32)
        )
        num_yielded = np.array([len(drafts.yielded) for drafts in every], dtype=np.int32)
        slots = slots[num_yielded > 0]
        num_yielded = num_yielded[num_yielded > 0]
        if len(slots):
            self.num_computed[slots] += num_yielded
            self.num_tokens[slots] += num_yielded
            ones = [1] * len(slots)
            writes.write_each(state.num_computed_offset(slots).tolist(), ones, self.num_computed[slots])
            writes.write_each(state.num_tokens_offset(slots).tolist(), ones, self.num_tokens[slots])

    def _indices_of(self, plan: StepPlan) -> BatchIndices:
        """Return the indices of a recent step if they fit, which saves most of the work, else new ones."""
        for number, recent in enumerate(self._recent):
            if recent.num_decodes == plan.num_decodes and recent.scheduled == plan.scheduled:
                del self._recent[number]
                self._recent.append(recent)  # the longest unused one is replaced
                return recent
        indices = BatchIndices.of(plan.scheduled, plan.num_decodes, self.rows_of(plan.scheduled))
        if not self._is_last_stage:
            indices.sample_of_row.fill(-1)
        indices.sample_of_row[indices.drafted] = HAS_DRAFTS
        self._recent.append(indices)
        return indices
