"""The V2 model runner: implements pdserve.protocols.ModelRunner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.config.node_config import NodeConfig
from pdserve.config.parallel import shard_of
from pdserve.kv import KVLayout
from pdserve.protocols import PendingStep
from pdserve.records import KVRegion, ScheduledSequence, StepOutput, StepPlan
from runner.attention.build import build_backend
from runner.distributed.parallel_state import ParallelState
from runner.distributed.pipeline_stages import PipelineStages
from runner.distributed.token_return import TokenReturn
from runner.kernels.step import TOKEN_CHUNK, put_tokens_kernel, take_samples_kernel
from runner.kv_cache import KVCache
from runner.loading.kv_capacity import layout_that_fits
from runner.loading.model_loader import LoadedModel
from runner.pending_step import FinishedStep, step_without_samples
from runner.sampling.prompt_logprobs import follow
from runner.sampling.prompt_targets import PromptTargets
from runner.v2.forward import Forward
from runner.v2.graphs import StepShape
from runner.v2.inputs import StepInputs
from runner.v2.sampler import DeviceSampler, Draw, Masks, Sampled, SamplingBatch
from runner.v2.sampler import upload as upload_arrays
from runner.v2.slots import BatchForm, ScheduledBatch, Slots
from runner.v2.state import DeviceState, Upload, Uploader
from runner.v2.tokens_in_flight import ToHost
from runner.warmup import run_largest_steps, run_small_steps

_SLOTS, _QUERY_STARTS, _DRAW_OF_ROW, _LAST_TOKENS = range(4)  # the arrays of a step's upload
_NUM_ARRAYS = 4


class RunnerV2:
    """Weights, KV cache and sequences of one rank, whose state is on the device; see runner/v2/__init__.py."""

    def __init__(self, config: NodeConfig, world: ParallelState, progress: Callable[[str, float], None]) -> None:
        """Load the model and warm up. Raises CapacityError before, CheckpointError while reading the weights."""
        self._world = world
        self._loaded = LoadedModel(config, world, progress)
        self._device = self._loaded.device
        self._max_in_flight = config.split.pp + 1
        self._stages = PipelineStages(world, config, self._loaded.placement.dtype, self._max_in_flight)
        self._returning = TokenReturn(self._stages.tokens_in)
        self._targets = PromptTargets()  # on the last stage, else none
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
            with torch.inference_mode():
                self._forward.capture(lambda fraction: progress("capturing CUDA graphs", fraction))
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
            self._loaded.placement,
            config.max_num_seqs,
            config.max_model_len + config.max_batch_tokens,
        )
        self._state = DeviceState(config.max_num_seqs, config.max_model_len + 1, max_blocks, device)
        self._uploader = Uploader(config.max_batch_tokens + 8 * config.max_num_seqs, self._max_in_flight, device)
        self._slots = Slots(self._state, self._uploader, config.split.pp)
        self._inputs = StepInputs(
            config.max_num_seqs, config.max_batch_tokens, max_blocks * layout.pages_per_block, layout, device
        )
        self._sampler = DeviceSampler(model.vocab_size, model.eos_token_ids, self._state)
        self._to_host = ToHost(device, config.max_num_seqs, self._max_in_flight)
        self._forward = Forward(config, self._loaded, self._backend, self._inputs, self._stages)
        self._asked: deque[tuple[BatchForm, SamplingBatch]] = deque(maxlen=config.split.pp)  # by the last steps

    def _try_out(self, config: NodeConfig, layout: KVLayout) -> int:
        """Run the largest steps on a small cache and free it again. Returns the bytes that CUDA graphs will keep."""
        self._allocate(config, layout)
        run_largest_steps(self, config)
        kept = 0
        if config.cuda_graphs:
            torch.cuda.empty_cache()
            before = torch.cuda.mem_get_info(self._device)[0]
            with torch.inference_mode():
                self._forward.capture(lambda fraction: None, most=2)
            # Further graphs fit into the pool of these and cost their nodes alone, for which as much again is plenty.
            kept = (before - torch.cuda.mem_get_info(self._device)[0]) * 2
        self._free()
        return kept

    def _free(self) -> None:
        for name in (
            "_forward",
            "_backend",
            "_cache",
            "_state",
            "_uploader",
            "_slots",
            "_inputs",
            "_sampler",
        ):
            self.__dict__.pop(name, None)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

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
        form, is_last = batch.form, self._world.place.is_last
        targets = self._targets.take(plan.scheduled)
        shape = None if targets else self._forward.shape_for(form)
        draw_of_row = form.draw_of_row if is_last else np.full_like(form.draw_of_row, -1)  # others draw nothing
        returned = [self._state.places(r.rows, r.positions, r.wanted) for r in self._returning.due(plan.scheduled)]
        upload = self._uploader.send(form.slots, form.query_starts, draw_of_row, form.last_tokens, *returned)
        self._uploader.apply(upload, self._state)
        self._take_returned(upload, returned)
        self._inputs.build(batch, shape or StepShape(form.num_seqs, form.num_tokens), self._state, upload)
        last_tokens = upload.array(_LAST_TOKENS, len(form.sampling))
        late = self._stages.late_mlps(plan.step, form.num_tokens)
        if not targets:
            return self._end(plan, batch, upload, self._forward.run(batch, last_tokens, shape, late))
        hidden, logits = self._forward.run_whole(batch, last_tokens, late)
        return follow(self._end(plan, batch, upload, logits), targets, hidden, self._loaded.decoder.logits)

    def _end(self, plan: StepPlan, batch: ScheduledBatch, upload: Upload, logits: Tensor) -> PendingStep:
        """Sample, or leave it to the last stage, and let the state follow. ``logits`` are of the rows that sample."""
        form = batch.form
        if not (self._world.place.is_last and len(form.sampling)):
            self._take_in(form, upload, None)
            self._expect_tokens(plan.scheduled, form)
            return step_without_samples(plan.step, self._device)
        asked = self._ask(plan.scheduled, form)
        sampled = self._sampler.sample(logits, asked, batch.longest, self._masks(plan, form))
        self._send_back(form, sampled)
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
        self._stages.close()
        del self._stages, self._returning
        self._world.close()

    # ------------------------------------------------------------ a step

    def _update(self, plan: StepPlan) -> None:
        for seq in plan.finished:
            self._slots.remove(seq)
            self._returning.forget(seq)
            self._targets.forget(seq)
        for new in plan.new:
            self._slots.add(new)
            if self._world.place.is_last:
                self._targets.add(new)
        for more in plan.new_blocks:
            self._slots.add_blocks(more.seq, more.block_ids)

    def _ask(self, scheduled: tuple[ScheduledSequence, ...], form: BatchForm) -> SamplingBatch:
        """What the step's draws ask for; that of one of the last steps where it has the same form."""
        for known, asked in self._asked:
            if known is form:
                return asked
        draws = []
        for row, sequence in enumerate(form.sampling_of(scheduled)):
            slot = int(form.slots[form.sampling[row]])
            record = self._slots.record(slot)
            choices = range(sequence.num_samples) if sequence.num_samples > 1 else (record.choice,)
            draws += [Draw(row, slot, record.sampling, choice, record.prompt_len) for choice in choices]
        self._asked.append((form, self._sampler.prepare(draws)))
        return self._asked[-1][1]

    def _masks(self, plan: StepPlan, form: BatchForm) -> Masks | None:
        """What grammars allow the step's draws."""
        if not plan.masks:
            return None
        at = {mask.seq: index for index, mask in enumerate(plan.masks)}
        of_draw = [at.get(s.seq, -1) for s in form.sampling_of(plan.scheduled) for _ in range(s.num_samples)]
        return self._sampler.prepare_masks([mask.words for mask in plan.masks], of_draw)

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

    # ------------------------------------------------------------ between stages

    def _send_back(self, form: BatchForm, sampled: Sampled) -> None:
        """To the first stage, of each sequence that samples the token with which it goes on."""
        if self._stages.tokens_out is None:
            return
        tokens = sampled.tokens
        if len(tokens) > len(form.sampling):
            (first,) = upload_arrays([form.draw_of_row[form.sampling]], self._device)
            tokens = tokens.index_select(0, first)
        self._stages.tokens_out.send(tokens)

    def _expect_tokens(self, scheduled: tuple[ScheduledSequence, ...], form: BatchForm) -> None:
        """The last stage draws a token for each sequence that samples; they come here if this is the first one."""
        slots = form.slots[form.sampling]
        seqs = (sequence.seq for sequence in form.sampling_of(scheduled))
        self._returning.expect(seqs, slots, self._slots.num_tokens[slots] - 1)

    def _take_returned(self, upload: Upload, returned: list[NDArray[np.int32]]) -> None:
        """``returned`` is where the tokens of messages belong, which the upload has behind the step's own arrays."""
        for index, places in enumerate(returned, _NUM_ARRAYS):
            with self._returning.take() as tokens:
                put_tokens_kernel[(-(-len(places) // TOKEN_CHUNK),)](
                    self._state.flat, upload.words, upload.arrays_at[index], tokens, len(places), CHUNK=TOKEN_CHUNK
                )
