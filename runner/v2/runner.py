"""The V2 model runner: implements pdserve.protocols.ModelRunner."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdserve.config.node_config import NodeConfig
from pdserve.kv.layout import KVLayout
from pdserve.pausing import Pausing
from pdserve.protocols import PendingStep, WeightReader
from pdserve.records import StepPlan
from runner.base import BaseModelRunner, Progress
from runner.distributed.parallel_state import ParallelState
from runner.memory.process_memory import process_memory
from runner.step_parts import StepFeature
from runner.v2.async_output import AsyncOutputCopy
from runner.v2.device_sampler import DeviceSampler
from runner.v2.device_state import DeviceState, StagedWrites
from runner.v2.drafts import DeviceDrafts
from runner.v2.forward import ForwardPass
from runner.v2.grammar_masks import GrammarMasks
from runner.v2.input_batch import BatchIndices, InputBatch, InputBuffers
from runner.v2.request_states import RequestStates
from runner.v2.returned_tokens import DeviceReturnedTokens
from runner.v2.sampling_metadata import MetadataBuilder, SamplingMetadata, copy_to_device
from runner.v2.verification import DeviceVerification


class RunnerV2(BaseModelRunner[InputBatch]):
    """Keeps the state of sequences on the device; see runner/v2/__init__.py."""

    _sequences: RequestStates

    def __init__(
        self, config: NodeConfig, parallel: ParallelState, progress: Progress, reader: WeightReader | None = None
    ) -> None:
        super().__init__(config, parallel, progress, config.parallel.pp + 1, reader)
        assert not len(self._sequences), "warming up left a sequence behind"

    def _allocate_state(self, config: NodeConfig, layout: KVLayout) -> Sequence[StepFeature[InputBatch]]:
        device = self._device
        max_num_seqs = config.max_num_seqs
        max_blocks = config.max_model_len // layout.block_size + 1
        entries = max_blocks * layout.groups.num_groups
        self._state = DeviceState(max_num_seqs, config.max_model_len + 1, entries, device)
        # Room for two of the longest prompts.
        words = 2 * config.max_model_len + config.max_batch_tokens + 10 * max_num_seqs
        writes = StagedWrites(words, self.max_in_flight, device)
        self._sequences = RequestStates(self._state, writes, config.parallel.pp, self._is_last_stage)
        max_pages = max_blocks * layout.pages_per_block
        self._inputs = InputBuffers(config, layout, max_pages, device, makes_drafts=self._drafter is not None)
        self._metadata = MetadataBuilder(config.model.vocab_size, config.model.eos_token_ids, device)
        self._sampler = DeviceSampler(config.model.vocab_size, self._state)
        self._output_copy = AsyncOutputCopy(device, max_num_seqs * (1 + config.max_drafts), self.max_in_flight)
        self._forward = ForwardPass(config, self._model, self._attention, self._inputs, self._stages)
        self._verification = DeviceVerification(config, self._inputs, self._attention)
        self._drafts = DeviceDrafts(
            config, layout, self._drafter, self._state, self._forward.hidden, self._verification
        )
        features: list[StepFeature[InputBatch]] = []
        if self._is_last_stage:
            features.append(GrammarMasks(self._metadata))
        if self._stages.tokens_in is not None:
            features.append(DeviceReturnedTokens(self._stages.tokens_in, self._sequences, self._state, writes))
        return features

    def launches_by_layer(self, plan: StepPlan) -> bool:
        """Decide by size, even without graphs: then all steps launch by layer, and a wait before each idles the GPU."""
        return not self._forward.sizes.have(plan)

    @torch.inference_mode()
    def _capture_graphs(self, config: NodeConfig, progress: Callable[[str, float], None]) -> None:
        if config.cuda_graphs:
            for part in (self._forward, self._verification, self._drafts):
                part.capture(lambda fraction: progress("capturing CUDA graphs", fraction))

    @torch.inference_mode()
    def _graph_bytes(self, config: NodeConfig) -> int:
        if not config.cuda_graphs:
            return 0
        torch.cuda.empty_cache()
        before = process_memory(self._device)
        for part in (self._forward, self._verification, self._drafts):
            part.capture(lambda fraction: None, most=2)
        # Further graphs fit into the memory pool of these two and add only their nodes; as much again is plenty.
        return (process_memory(self._device) - before) * 2

    # ------------------------------------------------------------ a step

    def _prepare(self, plan: StepPlan) -> InputBatch:
        return self._sequences.schedule(plan)

    def _execute(
        self, plan: StepPlan, batch: InputBatch, all_hidden_states: bool
    ) -> Pausing[tuple[Tensor, Tensor | None]]:
        # A graph stores no snapshot amid a prompt, and has the inputs of text.
        eager = all_hidden_states or batch.state_snapshots or self._model.images.has_images
        batch.graph = None if eager else self._forward.graph_for(batch.indices)
        self._inputs.build(batch, batch.graph or batch.indices.descriptor, self._state)
        result = yield from self._forward.run(batch, all_hidden_states or self._drafter is not None)
        return result

    def _sample(self, plan: StepPlan, batch: InputBatch, logits: Tensor, hidden: Tensor) -> PendingStep:
        metadata = self._metadata_of(batch.indices)
        sampled = self._sampler.sample(logits, metadata, batch.longest, batch.masks)
        self._return_tokens(batch.indices, sampled.tokens)
        batch.store_samples(self._state, sampled.tokens)
        self._verification.follow(plan, batch, sampled.tokens)
        sampled = self._drafts.follow(batch, hidden, sampled, metadata, plan.drafts_ahead)
        return self._output_copy.start(plan, metadata, sampled)

    def _skip_sampling(self, batch: InputBatch, hidden: Tensor) -> None:
        batch.store_samples(self._state, self._state.num_tokens)  # not read: no row has a sample
        self._drafts.skip(batch, hidden)

    def _metadata_of(self, indices: BatchIndices) -> SamplingMetadata:
        """Return the batch's sampling parameters, which stay on the device while the batch stays the same."""
        if indices.metadata is None:
            indices.metadata = self._metadata.build(self._sequences.sampling_rows(indices))
        return indices.metadata

    def _return_tokens(self, indices: BatchIndices, tokens: Tensor) -> None:
        """Send the first stage the token that continues each sequence that samples."""
        if self._stages.tokens_out is None or not len(indices.continued):
            return
        if len(tokens) > len(indices.continued):
            (first,) = copy_to_device([indices.sample_of_row[indices.continued]], self._device)
            tokens = tokens.index_select(0, first)
        self._stages.tokens_out.send(tokens)
