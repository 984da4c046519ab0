"""The V1 model runner: implements pdserve.protocols.ModelRunner."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.config.node_config import NodeConfig
from pdserve.config.parallel import LateMLPs, shard_of
from pdserve.kv import KVLayout
from pdserve.protocols import PendingStep
from pdserve.records import KVRegion, Sample, ScheduledSequence, StepOutput, StepPlan
from runner.attention.build import build_backend
from runner.batch import AttentionBatch
from runner.distributed.parallel_state import ParallelState
from runner.distributed.pipeline_stages import PipelineStages
from runner.distributed.token_return import TokenReturn
from runner.kv_cache import KVCache
from runner.loading.kv_capacity import layout_that_fits
from runner.loading.model_loader import LoadedModel
from runner.pending_step import FinishedStep, step_without_samples
from runner.sampling.prompt_logprobs import follow
from runner.sampling.prompt_targets import PromptTargets
from runner.sampling.sampler import Sampler, SampleRow
from runner.v1.sequences import SequenceTable
from runner.warmup import run_largest_steps, run_small_steps


class RunnerV1:
    """Weights, KV cache and sequences of one rank. Sequence state is on the host and copied to the device each step."""

    def __init__(self, config: NodeConfig, world: ParallelState, progress: Callable[[str, float], None]) -> None:
        """Load the model and warm up. Raises CapacityError before, CheckpointError while reading the weights."""
        self._world = world
        self._loaded = LoadedModel(config, world, progress)
        self._device = self._loaded.device
        self._max_in_flight = config.split.pp
        self._stages = PipelineStages(world, config, self._loaded.placement.dtype, self._max_in_flight)
        self._returning = TokenReturn(self._stages.tokens_in)
        self._targets = PromptTargets()  # on the last stage, else none
        self._page_size = config.kv_layout.kernel_block_size
        layout = config.kv_layout
        if config.measure_kv_memory:
            progress("measuring memory", -1.0)
            layout = layout_that_fits(config, world, self._try_out)
        self._allocate(config, layout)
        if self._device.type == "cuda":
            progress("compiling kernels", -1.0)
            run_largest_steps(self, config)
            run_small_steps(self, config)
            self._cache.clear()

    def _allocate(self, config: NodeConfig, layout: KVLayout) -> None:
        with torch.inference_mode():
            self._cache = KVCache(layout, self._device, config.share)
            self._attention = build_backend(
                config.attention_backend,
                shard_of(config.model, config.place),
                self._cache,
                self._loaded.placement,
                config.max_num_seqs,
                config.max_model_len + config.max_batch_tokens,
            )
            self._sampler = Sampler(config.model.vocab_size, config.model.eos_token_ids, self._device)
        self._sequences = SequenceTable(config.max_num_seqs, config.max_model_len, layout)

    def _try_out(self, config: NodeConfig, layout: KVLayout) -> int:
        """Run the largest steps on a small cache; no memory is kept beyond their peak."""
        self._allocate(config, layout)
        run_largest_steps(self, config)
        del self._cache, self._attention, self._sampler
        return 0

    @property
    def kv_layout(self) -> KVLayout:
        return self._cache.layout

    @property
    def kv_region(self) -> KVRegion:
        return self._cache.region

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        step = self._launch(plan)
        return self._cache.digests.follow(step, plan.digests) if plan.digests else step

    def _launch(self, plan: StepPlan) -> PendingStep:
        """One step: update the sequences, compute what is scheduled, sample where the plan says so."""
        self._update(plan)
        if not plan.scheduled:
            return FinishedStep(StepOutput(plan.step))
        self._take_returned(plan.scheduled)
        rows = self._sequences.rows(plan.scheduled)
        lengths = np.array([s.num_tokens for s in plan.scheduled], dtype=np.int64)
        sampling = [row for row, s in enumerate(plan.scheduled) if s.num_samples > 0]
        last_tokens = lengths.cumsum()[sampling] - 1
        targets = self._targets.take(plan.scheduled)
        late = self._stages.late_mlps(plan.step, int(lengths.sum()))
        hidden = self._forward(rows, lengths, None if targets else last_tokens, late)
        self._sequences.num_computed[rows] += lengths
        if not targets:
            return self._end(plan, rows, sampling, hidden)
        step = self._end(plan, rows, sampling, hidden[self._to_device(last_tokens)])
        return follow(step, targets, hidden, self._loaded.decoder.logits)

    def _end(self, plan: StepPlan, rows: NDArray[np.int64], sampling: list[int], hidden: Tensor) -> PendingStep:
        """Draw for the sequences ``sampling``, whose hidden states are given, or leave it to the last stage."""
        if sampling and self._world.place.is_last:
            return FinishedStep(StepOutput(plan.step, self._sample(plan, rows, sampling, hidden)))
        self._expect_tokens([plan.scheduled[i].seq for i in sampling], rows[sampling])
        return step_without_samples(plan.step, self._device)

    def reload_weights(self, model_dir: str) -> None:
        self._loaded.reload(model_dir)

    def close(self) -> None:
        if self.__dict__.pop("_loaded", None) is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._stages.close()
        for name in ("_cache", "_attention", "_sampler", "_stages", "_returning"):
            self.__dict__.pop(name, None)
        self._world.close()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _update(self, plan: StepPlan) -> None:
        for seq in plan.finished:
            self._sequences.remove(seq)
            self._returning.forget(seq)
            self._targets.forget(seq)
        for new in plan.new:
            self._sequences.add(new)
            if self._world.place.is_last:
                self._targets.add(new)
        for more in plan.new_blocks:
            self._sequences.add_blocks(more.seq, more.block_ids)

    def _forward(
        self, rows: NDArray[np.int64], lengths: NDArray[np.int64], wanted: NDArray[np.int64] | None, late: LateMLPs
    ) -> Tensor:
        """Compute the next ``lengths`` tokens of each sequence.

        On the last stage: the hidden states of the tokens ``wanted``, or of all.
        """
        table = self._sequences
        starts = table.num_computed[rows]
        seq_lens = starts + lengths
        query_starts = np.concatenate(([0], lengths.cumsum()))
        token_rows = np.repeat(rows, lengths)
        positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], lengths)
        assert (seq_lens <= table.num_tokens[rows]).all(), "a plan schedules tokens that do not exist yet"
        pages = table.pages[token_rows, positions // self._page_size].astype(np.int64)
        max_pages = int(seq_lens.max() - 1) // self._page_size + 1
        query_starts, seq_lens = query_starts.astype(np.int32), seq_lens.astype(np.int32)
        self._attention.plan(
            AttentionBatch(
                query_starts=query_starts,
                seq_lens=seq_lens,
                device_query_starts=torch.from_numpy(query_starts).to(self._device),
                device_seq_lens=torch.from_numpy(seq_lens).to(self._device),
                page_table=torch.from_numpy(table.pages[rows, :max_pages]).to(self._device),
                slots=self._to_device(pages * self._page_size + positions % self._page_size),
            )
        )
        device_positions = self._to_device(positions)
        rope_lengths = self._rope_lengths(rows, lengths, positions)
        keeps_all = wanted is None or len(wanted) == len(positions) or not self._world.place.is_last
        keep = None if wanted is None or keeps_all else self._to_device(wanted)
        return self._stages.compute(
            lambda start: self._loaded.decoder(start, device_positions, rope_lengths, self._attention, keep, late),
            self._to_device(table.token_ids[token_rows, positions]),
        )

    def _rope_lengths(
        self, rows: NDArray[np.int64], lengths: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> Tensor | None:
        if not self._loaded.decoder.rotary.depends_on_length:
            return None
        prompts = np.array([self._sequences.record(row).prompt_len for row in rows])
        return self._to_device(np.maximum(np.repeat(prompts, lengths), positions + 1))

    def _sample(
        self, plan: StepPlan, rows: NDArray[np.int64], sampling: list[int], hidden: Tensor
    ) -> tuple[Sample, ...]:
        """Draw for the sequences ``sampling``, whose hidden states [sampling, hidden_size] are given."""
        table, scheduled = self._sequences, plan.scheduled
        masks = {mask.seq: mask.words for mask in plan.masks}
        draws: list[SampleRow] = []
        for logits_row, i in enumerate(sampling):
            record = table.record(rows[i])
            tokens = table.token_ids[rows[i], : table.num_tokens[rows[i]]]
            several = scheduled[i].num_samples > 1
            for n in range(scheduled[i].num_samples):
                choice = n if several else record.choice
                mask = masks.get(record.seq)
                draws.append(SampleRow(logits_row, record.sampling, choice, tokens, record.prompt_len, mask))
        samples = self._sampler.sample(self._loaded.decoder.logits(hidden), draws)
        goes_on, first = [], 0  # each sequence with the first of its samples
        for i in sampling:
            goes_on.append(samples[first].token_id)
            table.append(rows[i], goes_on[-1])
            first += scheduled[i].num_samples
        if self._stages.tokens_out is not None:
            self._stages.tokens_out.send(torch.tensor(goes_on, dtype=torch.int32, device=self._device))
        return tuple(samples)

    def _expect_tokens(self, seqs: list[int], rows: NDArray[np.int64]) -> None:
        """The last stage draws a token for each of ``seqs``; it comes here if this is the first one."""
        num_tokens = self._sequences.num_tokens
        self._returning.expect(seqs, rows, num_tokens[rows])
        num_tokens[rows] += 1

    def _take_returned(self, scheduled: tuple[ScheduledSequence, ...]) -> None:
        for returned in self._returning.due(scheduled):
            with self._returning.take() as tokens:
                drawn = tokens.cpu().numpy()[returned.wanted]
            rows, positions = returned.rows[returned.wanted], returned.positions[returned.wanted]
            self._sequences.token_ids[rows, positions] = drawn

    def _to_device(self, values: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(values).to(self._device, torch.int64, non_blocking=True)
