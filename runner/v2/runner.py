"""The V2 model runner: implements pdserve.protocols.ModelRunner."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pdserve.config import NodeConfig
from pdserve.kv import KVLayout
from pdserve.protocols import PendingStep
from pdserve.records import KVRegion, StepOutput, StepPlan
from runner.attention import AttentionBatch
from runner.attention.build import build_backend
from runner.kernels.step import take_samples_kernel
from runner.kv_cache import KVCache
from runner.kv_room import layout_that_fits
from runner.loading import LoadedModel
from runner.pending import FinishedStep
from runner.v2.graphs import DecodeGraphs, padded_sizes
from runner.v2.inputs import StepInputs
from runner.v2.pending import ToHost
from runner.v2.sampler import DeviceSampler, Draw, Sampled, SamplingBatch
from runner.v2.slots import ScheduledBatch, Slots
from runner.v2.state import DeviceState, Upload, Uploader
from runner.warmup import run_largest_steps, run_small_steps

_SLOTS, _QUERY_STARTS, _DRAW_OF_ROW, _LAST_TOKENS = range(4)  # the arrays of a step's upload


class RunnerV2:
    """Weights, KV cache and sequences of one rank, whose state is on the device; see runner/v2/__init__.py."""

    def __init__(self, config: NodeConfig, progress: Callable[[str, float], None]) -> None:
        """Load the model and warm up. Raises CapacityError before, CheckpointError while reading the weights."""
        self._loaded = LoadedModel(config, progress)
        self._device = self._loaded.device
        layout = config.kv_layout
        if config.measure_kv_memory:
            progress("measuring memory", -1.0)
            layout = layout_that_fits(config, self._device, self._try_out)
        self._allocate(config, layout)
        if self._device.type == "cuda":  # elsewhere Triton interprets, and nothing is compiled
            progress("compiling kernels", -1.0)
            run_largest_steps(self, config)
            run_small_steps(self, config)
        self._capture(padded_sizes(config.max_num_seqs) if config.cuda_graphs else (), progress)
        self._cache.clear()
        assert not len(self._slots), "warming up left a sequence behind"

    @torch.inference_mode()
    def _allocate(self, config: NodeConfig, layout: KVLayout) -> None:
        """Everything whose size depends on the KV cache or on the limits of a step."""
        model, device = config.model, self._device
        max_blocks = config.max_model_len // layout.block_size + 1
        self._cache = KVCache(layout, device)
        self._backend = build_backend(
            config.attention_backend,
            model,
            self._cache,
            self._loaded.place,
            config.max_num_seqs,
        )
        self._state = DeviceState(config.max_num_seqs, config.max_model_len + 1, max_blocks, device)
        self._uploader = Uploader(config.max_batch_tokens + 8 * config.max_num_seqs, device)
        self._slots = Slots(self._state, self._uploader)
        self._inputs = StepInputs(
            config.max_num_seqs, config.max_batch_tokens, max_blocks * layout.pages_per_block, layout, device
        )
        self._sampler = DeviceSampler(model.vocab_size, model.eos_token_ids, self._state)
        self._to_host = ToHost(device)
        self._graphs = DecodeGraphs(())
        self._hidden = torch.empty(
            config.max_num_seqs, model.hidden_size, dtype=self._loaded.place.dtype, device=device
        )
        self._last_asked: tuple[object, SamplingBatch] | None = None

    def _try_out(self, config: NodeConfig, layout: KVLayout) -> int:
        """Run the largest steps on a small cache and free it again. Returns the bytes that CUDA graphs will keep."""
        self._allocate(config, layout)
        run_largest_steps(self, config)
        kept = 0
        if config.cuda_graphs:
            torch.cuda.empty_cache()
            before = torch.cuda.mem_get_info(self._device)[0]
            sizes = padded_sizes(config.max_num_seqs)
            self._capture(sizes[-2:], lambda stage, fraction: None)
            # They share a pool; each further graph costs its kernel nodes, of which two are a generous measure.
            kept = (before - torch.cuda.mem_get_info(self._device)[0]) * 2
        self._free()
        return kept

    def _free(self) -> None:
        for name in (
            "_graphs",
            "_backend",
            "_cache",
            "_state",
            "_uploader",
            "_slots",
            "_inputs",
            "_sampler",
            "_hidden",
        ):
            self.__dict__.pop(name, None)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _capture(self, sizes: tuple[int, ...], progress: Callable[[str, float], None]) -> None:
        graphs = DecodeGraphs(sizes)
        graphs.capture(
            lambda size: self._backend.plan(self._inputs.padding(size), graph=True),
            self._forward_padded,
            lambda fraction: progress("capturing CUDA graphs", fraction),
        )
        self._graphs = graphs

    @property
    def max_in_flight(self) -> int:
        return 2

    @property
    def kv_layout(self) -> KVLayout:
        return self._cache.layout

    @property
    def kv_region(self) -> KVRegion:
        return self._cache.region

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Start one step: tell the device what is new, compute what is scheduled, sample where the plan says so."""
        self._update(plan)
        if not plan.scheduled:
            return FinishedStep(StepOutput(plan.step))
        batch = self._slots.schedule(plan.scheduled)
        size = self._graphs.size_for(len(batch.slots)) if batch.decodes_only else None
        upload = self._uploader.send(batch.slots, batch.query_starts, batch.draw_of_row, batch.last_tokens)
        self._uploader.apply(upload, self._state)
        attention = self._inputs.build(batch, size or len(batch.slots), self._state, upload)
        hidden = self._forward(batch, attention, size)
        sampled, asked = self._sample(batch, upload, hidden)
        self._take_in(batch, upload, sampled)
        if sampled is None or asked is None:
            return FinishedStep(StepOutput(plan.step))
        return self._to_host.send(plan.step, batch.sampling_sequences, asked, sampled)

    def reload_weights(self, model_dir: str) -> None:
        self._loaded.reload(model_dir)

    def close(self) -> None:
        if self.__dict__.pop("_loaded", None) is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._free()

    # ------------------------------------------------------------ a step

    def _update(self, plan: StepPlan) -> None:
        for seq in plan.finished:
            self._slots.remove(seq)
        for new in plan.new:
            self._slots.add(new)
        for s in plan.scheduled:
            if s.new_block_ids:
                self._slots.add_blocks(s.seq, s.new_block_ids)

    def _forward(self, batch: ScheduledBatch, attention: AttentionBatch, size: int | None) -> Tensor:
        """Hidden states [tokens, hidden_size] of every token; by a graph of ``size`` rows where one is given."""
        if size is not None:
            self._backend.plan(attention, graph=True)
            self._graphs.replay(size)
            return self._hidden[: batch.num_tokens]
        self._backend.plan(attention)
        return self._decode(batch.num_tokens)

    def _forward_padded(self, size: int) -> None:
        """What a graph of ``size`` rows captures."""
        self._hidden[:size].copy_(self._decode(size))

    def _decode(self, tokens: int) -> Tensor:
        inputs = self._inputs
        return self._loaded.decoder(inputs.input_ids[:tokens], inputs.positions[:tokens], None, self._backend)

    def _sample(
        self, batch: ScheduledBatch, upload: Upload, hidden: Tensor
    ) -> tuple[Sampled | None, SamplingBatch | None]:
        """The step's draws, and what was asked for in them."""
        if not len(batch.sampling):
            return None, None
        if not batch.every_token_samples:
            hidden = hidden.index_select(0, upload.array(_LAST_TOKENS, len(batch.sampling)))
        asked = self._asked(batch)
        longest = int(self._slots.num_tokens[batch.slots].max())
        return self._sampler.sample(self._loaded.decoder.logits(hidden), asked, longest), asked

    def _asked(self, batch: ScheduledBatch) -> SamplingBatch:
        """What the step's draws ask for; that of the last step where it is the same."""
        key = (batch.slots.tobytes(), tuple((s.seq, s.num_samples) for s in batch.scheduled))
        if self._last_asked is None or key != self._last_asked[0]:
            draws = []
            for row, (index, sequence) in enumerate(zip(batch.sampling, batch.sampling_sequences, strict=True)):
                slot = int(batch.slots[index])
                record = self._slots.record(slot)
                choices = range(sequence.num_samples) if sequence.num_samples > 1 else (record.choice,)
                draws += [Draw(row, slot, record.sampling, choice, record.prompt_len) for choice in choices]
            self._last_asked = (key, self._sampler.prepare(draws))
        return self._last_asked[1]

    def _take_in(self, batch: ScheduledBatch, upload: Upload, sampled: Sampled | None) -> None:
        """Let the state on the device, and what the host knows of it, be that after the step."""
        state, at = self._state, upload.arrays_at
        take_samples_kernel[(len(batch.slots),)](
            upload.words,
            at[_SLOTS],
            at[_QUERY_STARTS],
            at[_DRAW_OF_ROW],
            state.num_tokens if sampled is None else sampled.tokens,  # not read where no sequence samples
            state.token_ids,
            state.num_computed,
            state.num_tokens,
            state.token_ids.stride(0),
        )
        self._slots.count_samples(batch)
