"""Which drafts of a step are right, on the device, and recurrent states that go on by these.

The host learns it later (runner/sampling/verification.py). Decodes are the first sequences of a step, and each of their
tokens has a sample: that of token t is sample t.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pdserve.config.node_config import NodeConfig
from pdserve.records import StepPlan
from runner.attention import AttentionBackend
from runner.batch import AttentionBatch
from runner.graph_sizes import BatchDescriptor, GraphSizes
from runner.v2.cuda_graphs import CudaGraphs
from runner.v2.input_batch import InputBatch, InputBuffers
from runner.v2.sampling_metadata import copy_to_device


class DeviceVerification:
    """Steps that only decode have CUDA graphs for what follows their samples, which are then at a fixed address."""

    def __init__(self, config: NodeConfig, inputs: InputBuffers, backend: AttentionBackend) -> None:
        self.inputs = inputs
        self.backend = backend
        self._states = backend.recurrent
        self._most = config.max_drafts
        follows = self._states is not None or config.model.num_draft_layers > 0
        has_graphs = config.cuda_graphs and config.max_drafts > 0 and follows
        #: The sizes of steps whose samples have a fixed address.
        self.sizes = GraphSizes.of_node(config).of_decodes if has_graphs else GraphSizes(())
        self._graphs = CudaGraphs(GraphSizes(()))
        device = inputs.input_ids.device
        self.sampled = torch.zeros(self.sizes.most_tokens, dtype=torch.int32, device=device)
        # Drafts of each sequence that are accepted on order; -1: the right ones.
        self._ordered = torch.full((config.max_num_seqs,), -1, dtype=torch.int64, device=device)

    def capture(self, on_progress: Callable[[float], None], most: int | None = None) -> None:
        """Capture graphs that advance recurrent states: of all sizes with drafts, or of the ``most`` largest."""
        sizes = [
            descriptor
            for descriptor in self.sizes.descriptors
            if self._states is not None and descriptor.row_tokens > 1
        ]
        graphs = CudaGraphs(GraphSizes(tuple(sizes[:most])))
        graphs.capture(self.sampled.device, self.inputs.padding, self._captured, on_progress)
        self._graphs = graphs

    def follow(self, plan: StepPlan, batch: InputBatch, sampled: Tensor) -> None:
        """Advance recurrent states by the right drafts of a step, and put samples where graphs expect them."""
        if (size := self.size_for(batch)) is not None:
            self.sampled[: len(sampled)].copy_(sampled)
        if self._states is None or not batch.indices.has_drafts:
            return
        if plan.drafts[0].accept is not None:  # then all have it
            self._order(plan)
        if size is not None and self._graphs.have(size):
            self._graphs.replay(size)
            return
        if batch.graph is not None:  # it has a plan of its own
            self.backend.plan(self.inputs.attention_batch(batch))
        self._states.commit(self._counts(batch.indices.descriptor, sampled))

    def size_for(self, batch: InputBatch) -> BatchDescriptor | None:
        """Return the size of the graphs that may follow a step, None if none may."""
        return batch.graph if batch.indices.only_decodes and batch.graph in self.sizes.descriptors else None

    def num_accepted(self, size: BatchDescriptor, sampled: Tensor) -> Tensor:
        """Return the accepted drafts of each sequence of the step, in any padding: [size.rows] int64.

        Only device memory at fixed addresses is read, beside ``sampled``, so a graph can capture it.
        """
        inputs = self.inputs
        starts = inputs.query_starts[: size.rows].long()
        lengths = inputs.query_lengths(size.rows)
        number = torch.arange(min(size.row_tokens - 1, self._most), device=starts.device)
        samples = (starts[:, None] + number).clamp_max(len(sampled) - 1)
        drafts = (starts[:, None] + number + 1).clamp_max(size.tokens - 1)
        is_draft = (number < lengths[:, None] - 1) & (inputs.drafted[: size.rows, None] > 0)
        right = is_draft & (sampled[samples] == inputs.input_ids[drafts])
        ordered = self._ordered[: size.rows]
        return torch.where(ordered < 0, right.long().cumprod(1).sum(1), ordered)

    def _captured(self, size: BatchDescriptor, padding: AttentionBatch) -> None:
        """Compute what the graph of this size captures."""
        assert self._states is not None
        self.backend.plan(padding, graph=size.longest)
        self._states.commit(self._counts(size, self.sampled[: size.tokens]))

    def _counts(self, size: BatchDescriptor, sampled: Tensor) -> Tensor:
        """Return the tokens that stay of each sequence with drafts, 0 of others: [size.rows] int64."""
        drafted = self.inputs.drafted[: size.rows].bool() & (self.inputs.query_lengths(size.rows) > 0)  # no padding
        return (self.num_accepted(size, sampled) + 1) * drafted

    def _order(self, plan: StepPlan) -> None:
        accepted = {drafts.seq: min(drafts.accept or 0, len(drafts.token_ids)) for drafts in plan.drafts}
        ordered = np.array([accepted.get(item.seq, 0) for item in plan.scheduled], dtype=np.int64)
        self._ordered[: len(ordered)].copy_(copy_to_device([ordered], self._ordered.device)[0])
