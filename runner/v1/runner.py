"""The V1 model runner: implements pdserve.protocols.ModelRunner."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.config import NodeConfig
from pdserve.kv import KVLayout
from pdserve.protocols import PendingStep
from pdserve.records import KVRegion, Sample, ScheduledSequence, StepOutput, StepPlan
from pdserve.split import shard_of
from runner.attention import AttentionBatch
from runner.attention.build import build_backend
from runner.kv_cache import KVCache
from runner.kv_room import layout_that_fits
from runner.loading import LoadedModel
from runner.pending import FinishedStep, step_without_samples
from runner.sampler import Sampler, SampleRow
from runner.v1.sequences import SequenceTable
from runner.warmup import run_largest_steps, run_small_steps
from runner.world import World


class RunnerV1:
    """Weights, KV cache and sequences of one rank. Sequence state is on the host and copied to the device each step."""

    def __init__(self, config: NodeConfig, world: World, progress: Callable[[str, float], None]) -> None:
        """Load the model and warm up. Raises CapacityError before, CheckpointError while reading the weights."""
        self._world = world
        self._loaded = LoadedModel(config, world, progress)
        self._device = self._loaded.device
        self._max_in_flight = config.split.pp
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
                self._loaded.place,
                config.max_num_seqs,
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
        rows = self._sequences.rows(plan.scheduled)
        lengths = np.array([s.num_tokens for s in plan.scheduled], dtype=np.int64)
        sampling = [row for row, s in enumerate(plan.scheduled) if s.num_samples > 0]
        hidden = self._forward(rows, lengths, sampling)
        self._sequences.num_computed[rows] += lengths
        if not sampling:
            return step_without_samples(plan.step, self._device)
        return FinishedStep(StepOutput(plan.step, self._sample(plan.scheduled, rows, sampling, hidden)))

    def reload_weights(self, model_dir: str) -> None:
        self._loaded.reload(model_dir)

    def close(self) -> None:
        for name in ("_loaded", "_cache", "_attention", "_sampler"):
            self.__dict__.pop(name, None)
        self._world.close()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _update(self, plan: StepPlan) -> None:
        for seq in plan.finished:
            self._sequences.remove(seq)
        for new in plan.new:
            self._sequences.add(new)
        for more in plan.new_blocks:
            self._sequences.add_blocks(more.seq, more.block_ids)

    def _forward(self, rows: NDArray[np.int64], lengths: NDArray[np.int64], sampling: list[int]) -> Tensor:
        """Compute the next ``lengths`` tokens of each sequence; of those that sample, the last hidden state."""
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
        hidden = self._loaded.decoder(
            self._to_device(table.token_ids[token_rows, positions]),
            self._to_device(positions),
            self._rope_lengths(rows, lengths, positions),
            self._attention,
            None if len(sampling) == len(positions) else self._to_device(query_starts[1:][sampling] - 1),
        )
        assert isinstance(hidden, Tensor), "pipeline stages are not connected"
        return hidden

    def _rope_lengths(
        self, rows: NDArray[np.int64], lengths: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> Tensor | None:
        if not self._loaded.decoder.rotary.depends_on_length:
            return None
        prompts = np.array([self._sequences.record(row).prompt_len for row in rows])
        return self._to_device(np.maximum(np.repeat(prompts, lengths), positions + 1))

    def _sample(
        self,
        scheduled: tuple[ScheduledSequence, ...],
        rows: NDArray[np.int64],
        sampling: list[int],
        hidden: Tensor,
    ) -> tuple[Sample, ...]:
        """Draw for the sequences ``sampling``, whose hidden states [sampling, hidden_size] are given."""
        table = self._sequences
        draws: list[SampleRow] = []
        for logits_row, i in enumerate(sampling):
            record = table.record(rows[i])
            tokens = table.token_ids[rows[i], : table.num_tokens[rows[i]]]
            several = scheduled[i].num_samples > 1
            for n in range(scheduled[i].num_samples):
                choice = n if several else record.choice
                draws.append(SampleRow(logits_row, record.sampling, choice, tokens, record.prompt_len))
        samples = self._sampler.sample(self._loaded.decoder.logits(hidden), draws)
        first = 0  # of each sequence's samples, with which it goes on
        for i in sampling:
            table.append(rows[i], samples[first].token_id)
            first += scheduled[i].num_samples
        return tuple(samples)

    def _to_device(self, values: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(values).to(self._device, torch.int64, non_blocking=True)
