"""The base of model runners on torch: building, the order of a launch, reloading weights, closing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pdserve.adapters.adapter import Adapter
from pdserve.config.node_config import NodeConfig
from pdserve.errors import CheckpointError, NodeError
from pdserve.kv.layout import KVLayout, KVRegion
from pdserve.kv.states import StateLayout
from pdserve.pausing import Pausing, complete
from pdserve.protocols import PendingStep, WeightReader
from pdserve.records import DigestOrder, StepOutput, StepPlan
from pdserve.weights.change import FileStates, WeightChange
from pdserve.weights.sharing import OfferedMemory
from runner.adapters.adapter_steps import ADAPTER_COPIES, AdapterSteps
from runner.adapters.host_adapters import HostAdapters
from runner.attention.build import build_backend, import_early
from runner.distributed.parallel_state import ParallelState
from runner.distributed.pipeline_stages import PipelineStages
from runner.image_encoding import IMAGE_COPIES, ImageEncoding
from runner.kv_cache import BlockCopies, KVCache
from runner.kv_digest import BlockDigests, DigestsOfBlocks
from runner.loading.decoder_weights import DecoderWeights
from runner.loading.model_loader import LoadedModel
from runner.loading.weight_changes import WeightChanger
from runner.memory.kv_memory import layouts_that_fit
from runner.models.vision.inputs import ImageInputs
from runner.pending_step import FinishedStep, step_without_samples
from runner.pinned_memory import reserve_pinned_memory
from runner.pooling import PromptPooling
from runner.sampling.drafter import Drafter
from runner.sampling.prompt_logprobs import PromptScoring
from runner.sequence_rows import SequenceRows
from runner.state_cache import StateCache, StateSlotCopies
from runner.step_parts import StepFeature, StepPart, StepWithParts
from runner.warmup import adapter_slots, product_sizes, run_largest_steps, run_mixed_steps, run_small_steps

_DIGESTS = 4  # reads whose digests are computed at a time

BatchT = TypeVar("BatchT")
Progress = Callable[[str, float], None]


class BaseModelRunner(ABC, Generic[BatchT]):
    """Weights, KV cache and sequences of one rank; implements pdserve.protocols.ModelRunner.

    A subclass keeps the state of sequences, runs the forward pass and samples.
    """

    _sequences: SequenceRows

    def __init__(
        self,
        config: NodeConfig,
        parallel: ParallelState,
        progress: Progress,
        max_in_flight: int,
        reader: WeightReader | None,
    ) -> None:
        """Load the model, size and allocate the KV cache, warm up. Raises CapacityError and CheckpointError."""
        self._parallel = parallel
        self._is_last_stage = parallel.position.is_last
        self._model = LoadedModel(config, parallel, progress, reader)
        self._changer = WeightChanger(config, self._model)
        self._adapters = _host_adapters(self._model, parallel)
        self._device = self._model.device
        self.max_in_flight = max_in_flight
        self._stages = PipelineStages(parallel, config, self._model.placement.dtype, max_in_flight)
        self._closed = False
        self._kept = frozenset(self.__dict__) | {"_kept"}
        layout = config.kv_layout
        states = config.state_layout
        if self._device.type == "cuda":  # on a CPU nothing is compiled or captured
            progress("compiling kernels", -1.0)
            importing = import_early(config.attention_backend)
            with torch.inference_mode():
                self._model.decoder.run_products(*product_sizes(config))
            importing.join()
        if config.measure_kv_memory:
            progress("measuring memory", -1.0)
            layout, states = layouts_that_fit(config, parallel, self._try_layouts)
        self._allocate(config, layout, states)
        if self._device.type == "cuda":
            copies = IMAGE_COPIES * max_in_flight if isinstance(self._model.images, ImageInputs) else 0
            copies += 0 if self._adapters is None else ADAPTER_COPIES * max_in_flight
            reserve_pinned_memory(max_in_flight + 2 + _DIGESTS + copies)
            if not config.measure_kv_memory:  # otherwise they have just run
                self._run_largest_steps(config)
        self._capture_graphs(config, progress)
        if self._device.type == "cuda":
            progress("warming up", -1.0)
            for slot in adapter_slots(config):
                run_small_steps(self, config, slot)  # as requests do: with graphs
                run_mixed_steps(self, config, slot)
            self._cache.clear()
            if self._states is not None:
                self._states.clear()

    # ------------------------------------------------------------ a subclass's own

    @abstractmethod
    def _allocate_state(self, config: NodeConfig, layout: KVLayout) -> Sequence[StepFeature[BatchT]]:
        """Allocate what depends on the cache or the limits of a step. Return the features that only this runner has."""

    @abstractmethod
    def _prepare(self, plan: StepPlan) -> BatchT:
        """Put the plan's batch together, and count its tokens and samples as done if the runner does so at launch."""

    @abstractmethod
    def _execute(self, plan: StepPlan, batch: BatchT, all_hidden_states: bool) -> Pausing[tuple[Tensor, Tensor | None]]:
        """Run the forward pass, with pauses between layers.

        Return hidden states, of all tokens if ``all_hidden_states`` or if there is a ``_drafter``, and logits [sampling
        rows, vocab_size]; None for logits on other stages than the last, and if no sequence samples.
        """

    @abstractmethod
    def _sample(self, plan: StepPlan, batch: BatchT, logits: Tensor, hidden: Tensor) -> PendingStep:
        """Draw tokens, update the state of sequences, and let ``_drafter`` follow the tokens if there is one."""

    @abstractmethod
    def _skip_sampling(self, batch: BatchT, hidden: Tensor) -> None:
        """Update sequences, and let ``_drafter`` follow the tokens, after a step in which this rank samples nothing."""

    def _capture_graphs(self, config: NodeConfig, progress: Callable[[str, float], None]) -> None:
        """Capture CUDA graphs, if the runner uses any."""

    def _graph_bytes(self, config: NodeConfig) -> int:
        """Measure the device memory that CUDA graphs will keep."""
        return 0

    # ------------------------------------------------------------ pdserve.protocols.ModelRunner

    def launch(self, plan: StepPlan) -> PendingStep:
        return complete(self.launch_with_pauses(plan))

    def launch_with_pauses(self, plan: StepPlan) -> Pausing[PendingStep]:
        with torch.inference_mode():  # also during the pauses: as a decorator it would be entered for each layer
            step = yield from self._launch(plan)
        return step

    def digest(self, order: DigestOrder) -> DigestsOfBlocks:
        return self._digests.start(order)

    def launches_by_layer(self, plan: StepPlan) -> bool:
        return False

    @property
    def loaded_files(self) -> FileStates:
        return self._model.files

    def offered_weights(self) -> OfferedMemory:
        return self._model.offered_weights()

    def check_weights(self, change: WeightChange) -> None:
        self._changer.check(change)

    def change_weights(self, change: WeightChange) -> None:
        self._changer.apply(change)
        for feature in self._features:
            feature.weights_changed()

    def load_adapter(self, adapter: Adapter) -> None:
        if self._adapters is None:
            raise CheckpointError(f"{adapter.directory}: this node takes no adapters; start it with --lora")
        self._adapters.load(adapter)

    def drop_adapter(self, digest: str) -> None:
        if self._adapters is not None:
            self._adapters.drop(digest)

    @property
    def has_weights(self) -> bool:
        return not self._changer.problem

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._free()
        self._stages.close()
        del self._stages, self._model, self._changer, self._adapters
        self._parallel.close()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # ------------------------------------------------------------ a step

    def _launch(self, plan: StepPlan) -> Pausing[PendingStep]:
        if plan.scheduled and self._changer.problem:
            raise NodeError(f"this node has no weights: {self._changer.problem}; reload a checkpoint")
        self._update(plan)
        parts = [part for feature in self._features if (part := feature.part(plan)) is not None]
        step: PendingStep = FinishedStep(StepOutput(plan.step))
        if plan.scheduled:
            step = yield from self._run(plan, parts)
        if not parts:
            return step
        for part in parts:
            part.after_step()
        if plan.images and not plan.scheduled:
            step = step_without_samples(plan.step, self._device)
        return StepWithParts(step, parts)

    def _update(self, plan: StepPlan) -> None:
        for seq in plan.finished:
            self._sequences.remove(seq)
            for feature in self._features:
                feature.remove(seq)
        for new in plan.new:
            self._sequences.add(new)
            for feature in self._features:
                feature.add(new)
        for more in plan.new_blocks:
            self._sequences.add_blocks(more.seq, more.block_ids)

    def _run(self, plan: StepPlan, parts: Sequence[StepPart[BatchT]]) -> Pausing[PendingStep]:
        """Launch the forward pass and the sampling of a batch, with the parts around them."""
        batch = self._prepare(plan)
        for part in parts:
            part.before_forward(batch)
        all_hidden_states = any(part.needs_all_hidden_states for part in parts)
        hidden, logits = yield from self._execute(plan, batch, all_hidden_states)
        for part in parts:
            part.after_forward(batch, hidden)
        if logits is not None:
            return self._sample(plan, batch, logits, hidden)
        self._skip_sampling(batch, hidden)
        return step_without_samples(plan.step, self._device)

    # ------------------------------------------------------------ memory

    @torch.inference_mode()
    def _allocate(self, config: NodeConfig, layout: KVLayout, states: StateLayout | None) -> None:
        """Allocate everything that depends on the size of the KV cache or on the limits of a step."""
        sources = self._model.shard.kv_places
        self._cache = KVCache(layout, self._device, config.share, config.rank_kv_scales, sources)
        self.kv_layout: KVLayout = layout
        self.kv_region: KVRegion = self._cache.region
        self._states = None
        if states is not None and config.state_share is not None:
            self._states = StateCache(states, self._device, config.state_share)
        self.state_layout: StateLayout | None = states
        self.state_region: KVRegion | None = None if self._states is None else self._states.region
        self._attention = build_backend(
            config.attention_backend,
            self._model.shard,
            self._cache,
            self._model.placement,
            config.max_num_seqs,
            config.max_model_len + config.max_batch_tokens,
            self._states,
            config.max_drafts,
        )
        self._drafter: Drafter | None = None
        if self._is_last_stage and config.model.num_draft_layers:
            self._drafter = Drafter(self._model.decoder, self._model.images, self._attention, layout.kernel_block_size)
        self._digests = BlockDigests(self._cache, self._states)
        # Digests are those of slots as they are behind the step's copies.
        copies = [] if self._states is None else [StateSlotCopies(self._states)]
        shared: list[StepFeature[Any]] = [BlockCopies(self._cache), *copies, self._digests]
        if self._adapters is not None:
            shared.append(AdapterSteps(self._adapters))
        if isinstance(self._model.images, ImageInputs):
            shared.append(ImageEncoding(config, self._model.images, self._model.tower, self._model.placement))
        if self._is_last_stage:
            shared.append(PromptScoring(self._model))
            if config.pooling is not None:
                shared.append(PromptPooling(config.pooling, self._model.decoder.logits, config.max_num_seqs))
        self._features: list[StepFeature[BatchT]] = [*shared, *self._allocate_state(config, layout)]

    def _try_layouts(self, config: NodeConfig, layout: KVLayout, states: StateLayout | None) -> int:
        """Run the largest steps on a small cache and free it again. Return the bytes that CUDA graphs will keep."""
        self._allocate(config, layout, states)
        self._run_largest_steps(config)
        kept = self._graph_bytes(config)
        self._free()
        return kept

    def _run_largest_steps(self, config: NodeConfig) -> None:
        for slot in adapter_slots(config):
            run_largest_steps(self, config, slot)

    def _free(self) -> None:
        """Drop every attribute that ``_allocate`` has set."""
        for name in self.__dict__.keys() - self._kept:
            del self.__dict__[name]


def _host_adapters(model: LoadedModel, parallel: ParallelState) -> HostAdapters | None:
    if model.adapter_slots is None:
        return None
    assert isinstance(model.weights, DecoderWeights), "adapters_problem refuses models of the library"
    return HostAdapters(model.adapter_slots, model.weights.adapter_places(), parallel.position.layers)
