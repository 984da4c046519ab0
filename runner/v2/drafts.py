"""The inputs of the model's own drafts, from the state on the device: the host knows no token of the step yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pdserve.kv import KVLayout
from runner.sampling.drafter import Drafter, DraftRows, PredictedTokens
from runner.v2.device_sampler import SamplerOutput
from runner.v2.device_state import DeviceState
from runner.v2.input_batch import SLOTS, BatchIndices, InputBatch, InputBuffers
from runner.v2.sampling_metadata import SamplingMetadata, copy_to_device


class SampledRows(NamedTuple):
    """The sequences of a batch that sample, one row each; on the device as long as the batch stays the same."""

    sequences: Tensor  # [rows] int64: their indices in the batch
    first: Tensor  # [rows] int64: the first token that has a sample, among those of the step
    num_drafts: Tensor  # [rows] int64
    drafted: Tensor  # int64: samples of sequences with drafts
    most_drafts: int

    @classmethod
    def of(cls, indices: BatchIndices, device: torch.device) -> SampledRows:
        sequences, first = np.unique(indices.sampling, return_index=True)
        num_drafts = np.where(sequences < indices.num_decodes, indices.lengths[sequences] - 1, 0)
        # Decodes come first, with a sample for each token.
        drafted = np.flatnonzero(np.isin(indices.sampling, indices.drafted))
        arrays = (sequences, indices.logits_tokens[first], num_drafts, drafted)
        tensors = copy_to_device([np.asarray(each, dtype=np.int64) for each in arrays], device)
        return cls(tensors[0], tensors[1], tensors[2], tensors[3], int(num_drafts.max(initial=0)))


@dataclass(frozen=True)
class DeviceDrafts:
    """Follows the tokens of each step if the model makes drafts, else does nothing."""

    drafter: Drafter | None
    state: DeviceState
    inputs: InputBuffers
    layout: KVLayout
    max_model_len: int

    def skip(self, batch: InputBatch, hidden: Tensor) -> None:
        """Follow the tokens of a step in which nothing samples. They have been counted in the state."""
        if self.drafter is not None:
            self.drafter.store(self._tokens(batch, hidden))

    def follow(
        self, batch: InputBatch, hidden: Tensor, output: SamplerOutput, metadata: SamplingMetadata, count: int
    ) -> SamplerOutput:
        """Follow the tokens of a step. Return the output with ``count`` drafts of each sequence that samples."""
        if self.drafter is None:
            return output
        rows, sampled = self._rows(batch.indices), output.tokens
        last = rows.first + self._num_accepted(batch.indices, rows, sampled)
        if len(rows.drafted):  # other samples are in the state
            slots = metadata.slot[rows.drafted].long()
            at = self.state.num_tokens[slots] + metadata.drafts_before[rows.drafted]
            self.state.token_ids.index_put_((slots, at.long()), sampled[rows.drafted])
        tokens = self._tokens(batch, hidden)
        if count:
            drafts = self.drafter.draft(tokens, self._draft_rows(batch, rows, last, count), count)
            return replace(output, drafts=drafts)
        self.drafter.store(tokens)
        return output

    def _rows(self, indices: BatchIndices) -> SampledRows:
        if indices.sampled_rows is None:
            indices.sampled_rows = SampledRows.of(indices, self.state.flat.device)
        return indices.sampled_rows

    def _num_accepted(self, indices: BatchIndices, rows: SampledRows, sampled: Tensor) -> Tensor:
        """Return the number of drafts of each row that equal the samples before them: [rows] int64."""
        if not rows.most_drafts:
            return torch.zeros_like(rows.first)
        index = torch.arange(rows.most_drafts, device=sampled.device)
        samples = rows.first[:, None] + index  # those of prompts are none, and do not count
        drafts = self.inputs.input_ids[(samples + 1).clamp_max(indices.num_tokens - 1)]
        right = (sampled[samples.clamp_max(len(sampled) - 1)] == drafts) & (index < rows.num_drafts[:, None])
        return right.long().cumprod(1).sum(1)

    def _tokens(self, batch: InputBatch, hidden: Tensor) -> PredictedTokens:
        """The tokens behind those of the step are in the state: of the prompt, or sampled."""
        indices, positions = batch.indices, self.inputs.positions[: batch.indices.num_tokens]
        slots = batch.sent.array(SLOTS, indices.num_seqs)
        if indices.num_tokens > indices.num_seqs:
            lengths = self.inputs.query_lengths(indices.num_seqs)
            slots = slots.repeat_interleave(lengths, output_size=indices.num_tokens)
        return PredictedTokens(self.state.token_ids[slots.long(), positions + 1], hidden, positions)

    def _draft_rows(self, batch: InputBatch, rows: SampledRows, last: Tensor, count: int) -> DraftRows:
        layout, indices = self.layout, batch.indices
        sampled = np.unique(indices.sampling)
        limits = np.minimum(batch.num_blocks[sampled].astype(np.int64) * layout.block_size, self.max_model_len)
        seq_lens = batch.seq_lens[sampled].astype(np.int64)
        (device_limits,) = copy_to_device([limits], last.device)
        num_blocks = -(-int(np.minimum(seq_lens + count, limits).max()) // layout.block_size)
        slots = batch.sent.array(SLOTS, indices.num_seqs)[rows.sequences].long()
        per_block = layout.pages_per_block
        pages = self.state.block_tables[slots, :num_blocks, None] * per_block
        pages = pages + torch.arange(per_block, dtype=torch.int32, device=last.device)
        return DraftRows(last, pages.view(len(sampled), -1), limits, device_limits, seq_lens)
