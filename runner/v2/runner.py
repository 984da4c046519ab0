"""The V2 model runner: implements pdserve.protocols.ModelRunner."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pdserve.config import NodeConfig
from pdserve.kv import KVLayout
from pdserve.protocols import PendingStep
from pdserve.records import KVRegion, ScheduledSequence, StepOutput, StepPlan
from pdserve.split import shard_of
from runner.attention.build import build_backend
from runner.kernels.step import take_samples_kernel
from runner.kv_cache import KVCache
from runner.kv_room import layout_that_fits
from runner.loading import LoadedModel
from runner.pending import FinishedStep, step_without_samples
from runner.v2.graphs import StepGraphs, StepShape, decode_shapes, mixed_shapes
from runner.v2.inputs import StepInputs
from runner.v2.pending import ToHost
from runner.v2.sampler import DeviceSampler, Draw, Sampled, SamplingBatch
from runner.v2.slots import BatchForm, ScheduledBatch, Slots
from runner.v2.state import DeviceState, Upload, Uploader
from runner.warmup import run_largest_steps, run_small_steps
from runner.world import World

_SLOTS, _QUERY_STARTS, _DRAW_OF_ROW, _LAST_TOKENS = range(4)  # the arrays of a step's upload


class RunnerV2:
    """Weights, KV cache and sequences of one rank, whose state is on the device; see runner/v2/__init__.py."""

    def __init__(self, config: NodeConfig, world: World, progress: Callable[[str, float], None]) -> None:
        """Load the model and warm up. Raises CapacityError before, CheckpointError while reading the weights."""
        self._world = world
        self._loaded = LoadedModel(config, world, progress)
        self._device = self._loaded.device
        self._max_in_flight = config.split.pp + 1
        layout = config.kv_layout
        if config.measure_kv_memory:
            progress("measuring memory", -1.0)
            layout = layout_that_fits(config, world, self._try_out)
        self._allocate(config, layout)
        if self._device.type == "cuda":  # elsewhere Triton interprets, and nothing is compiled
            progress("compiling kernels", -1.0)
            run_largest_steps(self, config)
            run_small_steps(self, config)
        if config.cuda_graphs:
            self._capture(_shapes(config), lambda fraction: progress("capturing CUDA graphs", fraction))
        self._cache.clear()
        assert not len(self._slots), "warming up left a sequence behind"

    @torch.inference_mode()
    def _allocate(self, config: NodeConfig, layout: KVLayout) -> None:
        """Everything whose size depends on the KV cache or on the limits of a step."""
        model, device = config.model, self._device
        max_blocks = config.max_model_len // layout.block_size + 1
        self._cache = KVCache(layout, device, config.share)
        self._backend = build_backend(
            config.attention_backend,
            shard_of(model, config.place),
            self._cache,
            self._loaded.place,
            config.max_num_seqs,
        )
        self._state = DeviceState(config.max_num_seqs, config.max_model_len + 1, max_blocks, device)
        self._uploader = Uploader(config.max_batch_tokens + 8 * config.max_num_seqs, self._max_in_flight, device)
        self._slots = Slots(self._state, self._uploader)
        self._inputs = StepInputs(
            config.max_num_seqs, config.max_batch_tokens, max_blocks * layout.pages_per_block, layout, device
        )
        self._sampler = DeviceSampler(model.vocab_size, model.eos_token_ids, self._state)
        self._to_host = ToHost(device, config.max_num_seqs, self._max_in_flight)
        self._graphs = StepGraphs(())
        # What graphs leave behind: logits of steps of single tokens, hidden states of others.
        dtype, most = self._loaded.place.dtype, max(shape.tokens for shape in _shapes(config))
        self._hidden = torch.empty(most, model.hidden_size, dtype=dtype, device=device)
        rows = config.max_num_seqs if config.cuda_graphs else 0
        self._logits = torch.empty(rows, model.vocab_size, dtype=dtype, device=device)
        self._last_asked: tuple[BatchForm, SamplingBatch] | None = None

    def _try_out(self, config: NodeConfig, layout: KVLayout) -> int:
        """Run the largest steps on a small cache and free it again. Returns the bytes that CUDA graphs will keep."""
        self._allocate(config, layout)
        run_largest_steps(self, config)
        kept = 0
        if config.cuda_graphs:
            torch.cuda.empty_cache()
            before = torch.cuda.mem_get_info(self._device)[0]
            largest = sorted(_shapes(config), key=lambda shape: -shape.tokens)[:2]
            self._capture(tuple(largest), lambda fraction: None)
            # Further graphs fit into the pool of these and cost their nodes alone, for which as much again is plenty.
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
            "_logits",
        ):
            self.__dict__.pop(name, None)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _capture(self, shapes: tuple[StepShape, ...], on_progress: Callable[[float], None]) -> None:
        graphs = StepGraphs(shapes)
        graphs.capture(
            lambda shape: self._backend.plan(self._inputs.padding(shape), graph=True), self._forward_padded, on_progress
        )
        self._graphs = graphs

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    @property
    def kv_layout(self) -> KVLayout:
        return self._cache.layout

    @property
    def kv_region(self) -> KVRegion:
        return self._cache.region

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        step = self._launch(plan)
        return self._cache.digests.follow(step, plan.digests) if plan.digests else step

    def _launch(self, plan: StepPlan) -> PendingStep:
        """Start one step: tell the device what is new, compute what is scheduled, sample where the plan says so."""
        self._update(plan)
        if not plan.scheduled:
            return FinishedStep(StepOutput(plan.step))
        batch = self._slots.schedule(plan.scheduled)
        form = batch.form
        shape = self._graphs.shape_for(form.num_seqs, form.num_tokens)
        upload = self._uploader.send(form.slots, form.query_starts, form.draw_of_row, form.last_tokens)
        self._uploader.apply(upload, self._state)
        unpadded = StepShape(form.num_seqs, form.num_tokens)
        self._inputs.build(batch, shape or unpadded, self._state, upload)
        logits = self._forward(batch, upload, shape)
        if not len(form.sampling):
            self._take_in(form, upload, None)
            return step_without_samples(plan.step, self._device)
        asked = self._asked(plan.scheduled, form)
        sampled = self._sampler.sample(logits, asked, batch.longest)
        self._take_in(form, upload, sampled)
        return self._to_host.send(plan.step, asked, sampled)

    def reload_weights(self, model_dir: str) -> None:
        self._loaded.reload(model_dir)

    def close(self) -> None:
        if self.__dict__.pop("_loaded", None) is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._free()
        self._world.close()

    # ------------------------------------------------------------ a step

    def _update(self, plan: StepPlan) -> None:
        for seq in plan.finished:
            self._slots.remove(seq)
        for new in plan.new:
            self._slots.add(new)
        for more in plan.new_blocks:
            self._slots.add_blocks(more.seq, more.block_ids)

    def _forward(self, batch: ScheduledBatch, upload: Upload, shape: StepShape | None) -> Tensor:
        """Logits [sampling rows, vocab_size], nothing of use where none samples; by the graph of ``shape`` if given."""
        form = batch.form
        if shape is not None:
            self._graphs.replay(shape)
            if shape.singles:
                return self._logits[: form.num_tokens]
        keep = None if form.every_token_samples else upload.array(_LAST_TOKENS, len(form.sampling))
        if shape is None:
            self._backend.plan(self._inputs.attention_batch(batch))
            hidden = self._decode(form.num_tokens, keep)
        else:
            hidden = self._hidden[: form.num_tokens]
            hidden = hidden if keep is None else hidden.index_select(0, keep)
        return self._loaded.decoder.logits(hidden) if len(form.sampling) else hidden

    def _forward_padded(self, shape: StepShape) -> None:
        """What the graph of a shape captures."""
        hidden = self._decode(shape.tokens, None)
        if shape.singles:
            self._loaded.decoder.write_logits(hidden, self._logits[: shape.rows])
        else:
            self._hidden[: shape.tokens].copy_(hidden)

    def _decode(self, tokens: int, keep: Tensor | None) -> Tensor:
        inputs = self._inputs
        hidden = self._loaded.decoder(inputs.input_ids[:tokens], inputs.positions[:tokens], None, self._backend, keep)
        assert isinstance(hidden, Tensor), "pipeline stages are not connected"
        return hidden

    def _asked(self, scheduled: tuple[ScheduledSequence, ...], form: BatchForm) -> SamplingBatch:
        """What the step's draws ask for; that of the last step where it has the same form."""
        if self._last_asked is None or self._last_asked[0] is not form:
            draws = []
            for row, sequence in enumerate(form.sampling_of(scheduled)):
                slot = int(form.slots[form.sampling[row]])
                record = self._slots.record(slot)
                choices = range(sequence.num_samples) if sequence.num_samples > 1 else (record.choice,)
                draws += [Draw(row, slot, record.sampling, choice, record.prompt_len) for choice in choices]
            self._last_asked = (form, self._sampler.prepare(draws))
        return self._last_asked[1]

    def _take_in(self, form: BatchForm, upload: Upload, sampled: Sampled | None) -> None:
        """Let the state on the device be that after the step."""
        state, at = self._state, upload.arrays_at
        take_samples_kernel[(form.num_seqs,)](
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


def _shapes(config: NodeConfig) -> tuple[StepShape, ...]:
    return (*decode_shapes(config.max_num_seqs), *mixed_shapes(config.max_num_seqs, config.max_batch_tokens))
