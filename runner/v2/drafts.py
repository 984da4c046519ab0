"""The model's own drafts behind a step, from the state on the device: the host knows no token of the step yet.

    step         layers (a graph) ─► sample ─┐
    behind it                                └─► predictor over the step's tokens ─► draft ─► predictor ─► draft …

Behind a step that only decodes, all of it is one CUDA graph, if one holds the step: each token has a sample, so the
graph needs nothing but the samples, the step's inputs and its hidden states. Without graphs the same calls run one by
one. Behind steps with prompts, tokens of prompts precede those of the state, and only some sequences sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.config.node_config import NodeConfig
from pdserve.kv.layout import KVLayout
from runner.batch import AttentionBatch
from runner.graph_sizes import BatchDescriptor, GraphSizes
from runner.sampling.drafter import Drafter, DraftRows, PredictedTokens
from runner.v2.cuda_graphs import CudaGraphs
from runner.v2.device_sampler import SamplerOutput
from runner.v2.device_state import DeviceState
from runner.v2.input_batch import BatchIndices, InputBatch, SampledRows
from runner.v2.sampling_metadata import SamplingMetadata
from runner.v2.verification import DeviceVerification


class DeviceDrafts:
    """Follows the tokens of each step if the model makes drafts, else does nothing."""

    def __init__(
        self,
        config: NodeConfig,
        layout: KVLayout,
        drafter: Drafter | None,
        state: DeviceState,
        hidden: Tensor,
        verification: DeviceVerification,
    ) -> None:
        """``hidden`` [tokens, hidden_size] is where graphs of the layers leave hidden states."""
        self._drafter = drafter
        self._state = state
        self._verification = verification
        self._inputs = verification.inputs
        self._backend = verification.backend
        self._block_size = layout.block_size
        self._page_size = layout.kernel_block_size
        self._max_model_len = config.max_model_len
        self._most = config.max_drafts
        self._sizes = GraphSizes(()) if drafter is None else verification.sizes
        self._graphs = CudaGraphs(GraphSizes(()))
        self._hidden = hidden
        rows = max((descriptor.rows for descriptor in self._sizes.descriptors), default=0)
        self._drafts = torch.zeros(rows, self._most, dtype=torch.int32, device=hidden.device)  # output of graphs

    def capture(self, on_progress: Callable[[float], None], most: int | None = None) -> None:
        """Capture the graphs of all sizes, or of the ``most`` largest."""
        graphs = CudaGraphs(GraphSizes(self._sizes.descriptors[:most]))
        graphs.capture(self._hidden.device, self._inputs.padding, self._captured, on_progress)
        self._graphs = graphs

    def skip(self, batch: InputBatch, hidden: Tensor) -> None:
        """Follow the tokens of a step in which nothing samples. They have been counted in the state."""
        if self._drafter is not None:
            self._plan_step(batch)
            self._drafter.store(self._tokens(batch, hidden))

    def follow(
        self, batch: InputBatch, hidden: Tensor, output: SamplerOutput, metadata: SamplingMetadata, count: int
    ) -> SamplerOutput:
        """Follow the tokens of a step. Return the output with ``count`` drafts of each sequence that samples."""
        if self._drafter is None:
            return output
        indices = batch.indices
        sampled = output.tokens
        size = self._verification.size_for(batch)
        if size is not None and count == self._most and self._graphs.have(size):
            self._graphs.replay(size)
            return replace(output, drafts=self._drafts[: indices.num_seqs].clone())  # the next step overwrites them
        self._plan_step(batch)
        if indices.only_decodes:
            tokens = PredictedTokens(sampled, hidden, self._inputs.positions[: indices.num_tokens])
        else:
            self._store_unverified(indices, sampled, metadata)
            tokens = self._tokens(batch, hidden)
        if not count:
            self._drafter.store(tokens)
            return output
        if indices.only_decodes:
            rows = self._decoded_rows(indices.descriptor, sampled, self._limits(batch), batch.seq_lens)
        else:
            rows = self._sampled_rows(batch, sampled, count)
        return replace(output, drafts=self._drafter.draft(tokens, rows, count))

    def _plan_step(self, batch: InputBatch) -> None:
        """Plan attention of the step's tokens, unless its layers have; a graph has a plan of its own."""
        if batch.graph is not None:
            self._backend.plan(self._inputs.attention_batch(batch))

    # ------------------------------------------------------------ behind decodes

    def _captured(self, size: BatchDescriptor, padding: AttentionBatch) -> None:
        """Run the calls that the graph of this size captures."""
        assert self._drafter is not None
        self._backend.plan(padding, graph=size.longest)
        sampled = self._verification.sampled[: size.tokens]
        any_values = np.ones(size.rows, dtype=np.int64)
        tokens = PredictedTokens(sampled, self._hidden[: size.tokens], self._inputs.positions[: size.tokens])
        rows = self._decoded_rows(size, sampled, any_values, any_values)
        self._drafts[: size.rows].copy_(self._drafter.draft(tokens, rows, self._most, graph=True))

    def _decoded_rows(
        self,
        size: BatchDescriptor,
        sampled: Tensor,
        limits: NDArray[np.int64],
        seq_lens: NDArray[np.integer],
    ) -> DraftRows:
        """Return the rows of decodes, in any padding; ``sampled`` [size.tokens] has a sample for each token.

        Only device memory at fixed addresses is read, so a graph can capture it.
        """
        inputs = self._inputs
        last = inputs.query_starts[: size.rows] + self._verification.num_accepted(size, sampled)
        row_mask = inputs.query_lengths(size.rows) > 0  # no padding
        return DraftRows(
            last=last.clamp_max(size.tokens - 1),
            starts=torch.nn.functional.pad(row_mask.cumsum(0), (1, 0)).int(),
            page_table=inputs.page_table[0, : size.rows],
            limits=limits,
            device_limits=self._device_limits(inputs.num_blocks[: size.rows]).masked_fill(~row_mask, 1),
            seq_lens=seq_lens.astype(np.int64),
        )

    # ------------------------------------------------------------ behind steps with prompts

    def _sampled_rows(self, batch: InputBatch, sampled: Tensor, count: int) -> DraftRows:
        indices = batch.indices
        rows = self._rows(indices)
        host_rows = np.unique(indices.sampling)
        limits = self._limits(batch)[host_rows]
        seq_lens = batch.seq_lens[host_rows].astype(np.int64)
        num_pages = -(-int(np.minimum(seq_lens + count, limits).max()) // self._page_size)
        return DraftRows(
            last=rows.first + self._verification.num_accepted(indices.descriptor, sampled)[rows.sequences],
            starts=torch.arange(len(limits) + 1, dtype=torch.int32, device=sampled.device),
            page_table=self._inputs.page_table[0, :, :num_pages].index_select(0, rows.sequences),
            limits=limits,
            device_limits=self._device_limits(self._inputs.num_blocks[rows.sequences]),
            seq_lens=seq_lens,
        )

    def _rows(self, indices: BatchIndices) -> SampledRows:
        if indices.sampled_rows is None:
            indices.sampled_rows = SampledRows.of(indices, self._state.flat.device)
        return indices.sampled_rows

    def _store_unverified(self, indices: BatchIndices, sampled: Tensor, metadata: SamplingMetadata) -> None:
        """Write the samples of decodes with drafts to the state, uncounted; other samples are there."""
        drafted = self._rows(indices).drafted
        if len(drafted):
            slots = metadata.slot[drafted].long()
            at = self._state.num_tokens[slots] + metadata.drafts_before[drafted]
            self._state.token_ids.index_put_((slots, at.long()), sampled[drafted])

    def _tokens(self, batch: InputBatch, hidden: Tensor) -> PredictedTokens:
        """Return the step's tokens with their next ones, which the state has: from the prompt, or sampled."""
        indices = batch.indices
        positions = self._inputs.positions[: batch.indices.num_tokens]
        slots = batch.sent.array(batch.at.slots, indices.num_seqs)
        if indices.num_tokens > indices.num_seqs:
            lengths = self._inputs.query_lengths(indices.num_seqs)
            slots = slots.repeat_interleave(lengths, output_size=indices.num_tokens)
        return PredictedTokens(self._state.token_ids[slots.long(), positions + 1], hidden, positions)

    # ------------------------------------------------------------ limits

    def _limits(self, batch: InputBatch) -> NDArray[np.int64]:
        """Return the tokens of each sequence that have a page."""
        return np.minimum(batch.num_blocks.astype(np.int64) * self._block_size, self._max_model_len)

    def _device_limits(self, num_blocks: Tensor) -> Tensor:
        """Return the tokens of each sequence that have a page, at least 1, on the device."""
        return (num_blocks.long() * self._block_size).clamp(1, self._max_model_len)
