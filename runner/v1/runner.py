"""The V1 model runner: implements pdserve.protocols.ModelRunner."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.config.node_config import NodeConfig
from pdserve.kv.layout import KVLayout
from pdserve.pausing import Pausing
from pdserve.protocols import PendingStep, WeightReader
from pdserve.records import StepOutput, StepPlan
from runner.base import BaseModelRunner, Progress
from runner.batch import AttentionBatch
from runner.distributed.parallel_state import ParallelState
from runner.pending_step import FinishedStep
from runner.sampling.drafter import Drafter, DraftRows, PredictedTokens
from runner.sampling.sampler import HostSamplingRow, Sampler
from runner.sampling.verification import without_rejected
from runner.sequence_rows import row_snapshots
from runner.step_parts import StepFeature
from runner.v1.returned_tokens import HostReturnedTokens
from runner.v1.sequences import HostBatch, SequenceTable


class RunnerV1(BaseModelRunner[HostBatch]):
    """Keeps the state of sequences on the host, and copies a step's inputs to the device. Needs plain torch only."""

    _sequences: SequenceTable

    def __init__(
        self, config: NodeConfig, parallel: ParallelState, progress: Progress, reader: WeightReader | None = None
    ) -> None:
        self._page_size = config.kv_layout.kernel_block_size
        self._pools = config.pooling is not None  # vectors of prompts instead of tokens
        super().__init__(config, parallel, progress, config.parallel.pp, reader)

    def _allocate_state(self, config: NodeConfig, layout: KVLayout) -> Sequence[StepFeature[HostBatch]]:
        self._max_model_len = config.max_model_len
        self._sampler = Sampler(config.model.vocab_size, config.model.eos_token_ids, self._device)
        self._sequences = SequenceTable(config.max_num_seqs, config.max_model_len, layout)
        receiver = self._stages.tokens_in
        return () if receiver is None else (HostReturnedTokens(receiver, self._sequences),)

    def _prepare(self, plan: StepPlan) -> HostBatch:
        for drafts in plan.drafts:
            if not self._is_last_stage:  # the last stage has counted them
                self._sequences.count_yielded(drafts.seq, drafts.yielded)
            self._sequences.put_drafts(drafts.seq, drafts.token_ids)
        batch = HostBatch.of(plan.scheduled, plan.num_decodes, self._sequences.rows_of(plan.scheduled))
        batch.state_snapshots = row_snapshots(plan)
        return batch

    def _execute(
        self, plan: StepPlan, batch: HostBatch, all_hidden_states: bool
    ) -> Pausing[tuple[Tensor, Tensor | None]]:
        logits_tokens = batch.logits_tokens
        all_hidden_states = all_hidden_states or self._drafter is not None
        hidden = yield from self._forward(batch, None if all_hidden_states else logits_tokens)
        self._count_computed(batch)
        if self._pools or not (self._is_last_stage and batch.sampled):
            return hidden, None
        last_hidden = hidden[self._to_device(logits_tokens)] if all_hidden_states else hidden
        return hidden, self._model.decoder.logits(last_hidden)

    def _count_computed(self, batch: HostBatch) -> None:
        """Count the tokens of a step as computed. For decodes with drafts, ``count_yielded`` does that."""
        lengths = batch.lengths
        if batch.has_drafts:
            lengths = lengths.copy()
            lengths[batch.drafted] = 0
        self._sequences.num_computed[batch.rows] += lengths

    def _sample(self, plan: StepPlan, batch: HostBatch, logits: Tensor, hidden: Tensor) -> PendingStep:
        table = self._sequences
        masks = {(mask.seq, mask.drafts_before): mask.words for mask in plan.masks}
        before = batch.drafts_before.tolist() if batch.has_drafts else [0] * len(batch.sampled)
        sampling_rows: list[HostSamplingRow] = []
        for logits_row, (row, sequence) in enumerate(zip(batch.sampling_rows, batch.sampled, strict=True)):
            record = table.record(row)
            tokens = table.token_ids[row, : table.num_tokens[row] + before[logits_row]]
            mask = masks.get((record.seq, before[logits_row]))
            for choice in sequence.sampled_choices(record.choice):
                sampling_rows.append(
                    HostSamplingRow(logits_row, record.sampling, choice, tokens, record.prompt_len, mask)
                )
        token_ids, logprobs = self._sampler.sample(logits, sampling_rows)
        one = batch.continued
        next_tokens = [token_ids[first] for first in batch.sample_of_row[one]]
        for row, token_id in zip(batch.rows[one], next_tokens, strict=True):
            table.append(row, token_id)
        if self._stages.tokens_out is not None and next_tokens:
            self._stages.tokens_out.send(torch.tensor(next_tokens, dtype=torch.int32, device=self._device))
        output = StepOutput(plan.step, token_ids=token_ids, logprobs=logprobs)
        output = self._verify(plan, batch, output) if batch.has_drafts else output
        if self._drafter is not None:
            output = self._draft(self._drafter, plan, batch, hidden, output)
        return FinishedStep(output)

    def _verify(self, plan: StepPlan, batch: HostBatch, sampled: StepOutput) -> StepOutput:
        """Return the output without the samples behind rejected drafts, and append the others to their sequences.

        Advance recurrent states by the accepted ones.
        """
        output = without_rejected(plan, sampled)
        if self._attention.recurrent is not None:
            counts = np.zeros(batch.num_seqs, dtype=np.int64)
            counts[: batch.num_decodes] = output.decode_counts
            self._attention.recurrent.commit(self._to_device(counts * batch.is_drafted))
        at = 0
        for item, count in zip(plan.scheduled, output.decode_counts, strict=False):
            if item.num_tokens > 1:
                self._sequences.count_yielded(item.seq, output.token_ids[at : at + count])
            at += count
        return output

    def _draft(
        self, drafter: Drafter, plan: StepPlan, batch: HostBatch, hidden: Tensor, output: StepOutput
    ) -> StepOutput:
        """Let the model predict what follows the tokens of a step, which have been counted."""
        table = self._sequences
        tokens = self._predicted_tokens(batch, hidden)
        if not plan.drafts_ahead:
            drafter.store(tokens)
            return output
        sampled = np.unique(batch.sampling)
        last = batch.query_starts[1:] - 1
        if output.decode_counts:
            last[: batch.num_decodes] = batch.query_starts[: batch.num_decodes] + np.array(output.decode_counts) - 1
        rows = batch.rows[sampled]
        seq_lens = batch.positions[last[sampled]] + 1
        limits = np.minimum(table.num_pages[rows] * self._page_size, self._max_model_len)
        max_pages = int((np.minimum(seq_lens + plan.drafts_ahead, limits).max() - 1) // self._page_size) + 1
        drafts = drafter.draft(
            tokens,
            DraftRows(
                last=self._to_device(last[sampled]),
                starts=torch.arange(len(sampled) + 1, dtype=torch.int32, device=self._device),
                page_table=torch.from_numpy(table.pages[0][rows, :max_pages]).to(self._device),
                limits=limits,
                device_limits=self._to_device(limits),
                seq_lens=seq_lens,
            ),
            plan.drafts_ahead,
        )
        seqs = [plan.scheduled[index].seq for index in sampled.tolist()]
        return msgspec.structs.replace(output, drafts=tuple(zip(seqs, map(tuple, drafts.tolist()), strict=True)))

    def _skip_sampling(self, batch: HostBatch, hidden: Tensor) -> None:
        self._sequences.num_tokens[batch.rows[batch.continued]] += 1  # the last stage samples them
        if self._drafter is not None:
            self._drafter.store(self._predicted_tokens(batch, hidden))

    def _predicted_tokens(self, batch: HostBatch, hidden: Tensor) -> PredictedTokens:
        next_ids = self._sequences.token_ids[np.repeat(batch.rows, batch.lengths), batch.positions + 1]
        return PredictedTokens(self._to_device(next_ids), hidden, self._to_device(batch.positions))

    def _forward(self, batch: HostBatch, wanted: NDArray[np.int32] | None) -> Pausing[Tensor]:
        """Compute the next ``lengths`` tokens of each sequence.

        Return the hidden states of the tokens ``wanted``, of all tokens if None or on other stages than the last.
        """
        table = self._sequences
        rows = batch.rows
        starts = table.num_computed[rows]
        seq_lens = (starts + batch.lengths).astype(np.int32)
        query_starts = batch.query_starts
        token_rows = np.repeat(rows, batch.lengths)
        positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], batch.lengths)
        assert (starts + batch.known <= table.num_tokens[rows]).all(), "a plan schedules tokens that do not exist yet"
        max_pages = int(seq_lens.max() - 1) // self._page_size + 1
        pages = [group[token_rows, positions // self._page_size].astype(np.int64) for group in table.pages]
        batch.positions = positions
        has_drafts = batch.has_drafts and self._attention.recurrent is not None
        self._attention.plan(
            AttentionBatch.of_groups(
                query_starts,
                seq_lens,
                device_query_starts=torch.from_numpy(query_starts).to(self._device),
                device_seq_lens=torch.from_numpy(seq_lens).to(self._device),
                page_tables=[torch.from_numpy(group[rows, :max_pages]).to(self._device) for group in table.pages],
                slots=[self._to_device(page_ids * self._page_size + positions % self._page_size) for page_ids in pages],
                state_slots=torch.from_numpy(table.state_slots[rows]).to(self._device),
                state_snapshots=batch.state_snapshots,
                drafted=torch.from_numpy(batch.is_drafted.astype(np.int32)).to(self._device) if has_drafts else None,
                later=self._model.images.later,
            )
        )
        device_positions = self._to_device(positions)
        rope_lengths = self._rope_lengths(batch, positions)
        keeps_all = wanted is None or len(wanted) == len(positions) or not self._is_last_stage
        keep = None if wanted is None or keeps_all else self._to_device(wanted)
        hidden = yield from self._stages.compute(
            lambda start: self._model.decoder.forward(start, device_positions, rope_lengths, self._attention, keep),
            self._to_device(table.token_ids[token_rows, positions]),
            self._model.decoder.beside(len(positions)),
        )
        return hidden

    def _rope_lengths(self, batch: HostBatch, positions: NDArray[np.int64]) -> Tensor | None:
        """Return for each token the sequence length that its rotary frequencies depend on, None if they do not."""
        if not self._model.decoder.depends_on_length:
            return None
        prompts = np.array([self._sequences.record(row).prompt_len for row in batch.rows])
        return self._to_device(np.maximum(np.repeat(prompts, batch.lengths), positions + 1))

    def _to_device(self, values: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(values).to(self._device, torch.int64, non_blocking=True)
