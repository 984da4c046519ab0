"""The forward pass of a step over the layers of a rank: a CUDA graph if one fits, else eager."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pdserve.config.node_config import NodeConfig
from pdserve.pausing import Pausing, complete, completed
from runner.attention import AttentionBackend
from runner.batch import AttentionBatch
from runner.distributed.pipeline_stages import PipelineStages
from runner.graph_sizes import BatchDescriptor, GraphSizes
from runner.loading.model_loader import LoadedModel
from runner.v2.cuda_graphs import CudaGraphs
from runner.v2.input_batch import BatchIndices, InputBatch, InputBuffers


class ForwardPass:
    """Graphs hold the layers only: messages between stages are copied to and from buffers of the graphs."""

    def __init__(
        self,
        config: NodeConfig,
        model: LoadedModel,
        backend: AttentionBackend,
        inputs: InputBuffers,
        stages: PipelineStages,
    ) -> None:
        self._model = model
        self._backend = backend
        self._inputs = inputs
        self._stages = stages
        self._position = config.position
        self.sizes = GraphSizes.of_node(config)
        self._adapters = None if model.adapter_slots is None else model.adapter_slots.tokens
        self._graphs = CudaGraphs(GraphSizes(()))
        self._adapted_graphs = self._graphs  # for steps in which a token has an adapter
        self._decode_sizes = GraphSizes(())  # sizes of graphs for decodes
        dtype = model.placement.dtype
        device = model.device
        hidden_size = config.model.hidden_size
        vocab_size = config.model.vocab_size
        most = self.sizes.most_tokens if config.cuda_graphs else 0
        rows = self.sizes.most_decode_tokens if config.cuda_graphs and self._position.is_last else 0
        # A graph starts with ``_start`` if there is a stage before. It leaves logits for decode steps on the last
        # stage, else hidden states; both if the model drafts.
        self._start = torch.zeros(0 if self._position.is_first else most, hidden_size, dtype=dtype, device=device)
        self._keeps_hidden = config.model.num_draft_layers > 0 and self._position.is_last
        self.hidden = torch.empty(most, hidden_size, dtype=dtype, device=device)
        self._logits = torch.empty(rows, vocab_size, dtype=dtype, device=device)

    def capture(self, on_progress: Callable[[float], None], most: int | None = None) -> None:
        """Capture the graphs of all sizes, or of the ``most`` largest."""
        self._graphs = self._capture(on_progress, most)
        self._decode_sizes = self._graphs.sizes.of_decodes
        if self._adapters is not None:
            self._adapters.capture()
            self._adapted_graphs = self._capture(on_progress, most)
            self._adapters.stop()

    def _capture(self, on_progress: Callable[[float], None], most: int | None) -> CudaGraphs:
        graphs = CudaGraphs(GraphSizes(self.sizes.descriptors[:most]))
        graphs.capture(self.hidden.device, self._inputs.padding, self._captured, on_progress)
        return graphs

    def graph_for(self, indices: BatchIndices) -> BatchDescriptor | None:
        """Return the size of the graph for this batch, None if none fits.

        Decodes of a model that drafts get a graph for decodes, even if a smaller one fits: drafts have one as large.
        """
        descriptor = None
        if self._keeps_hidden and indices.only_decodes:
            descriptor = self._decode_sizes.find(indices.descriptor)
        return descriptor or self._graphs.sizes.find(indices.descriptor)

    def run(self, batch: InputBatch, all_hidden_states: bool) -> Pausing[tuple[Tensor, Tensor | None]]:
        """Return hidden states, and logits [sampling rows, vocab_size] on the last stage if any row samples.

        The inputs have been built, padded to ``batch.graph`` if there is one. Hidden states are of all tokens if
        ``all_hidden_states``, which excludes a graph unless the model drafts.
        """
        indices = batch.indices
        descriptor = batch.graph
        selects = self._position.is_last and not indices.every_token_samples
        keep = batch.logits_tokens if selects and descriptor is None and not all_hidden_states else None
        if descriptor is None:
            self._backend.plan(self._inputs.attention_batch(batch, later=self._model.images.later))
        elif self._backend.replans(descriptor.longest):
            self._backend.plan(self._inputs.attention_batch(batch, descriptor), graph=descriptor.longest)
        hidden = yield from self._stages.compute(
            lambda start: (
                self._layers(start, keep) if descriptor is None else completed(self._replay(start, descriptor))
            ),
            self._inputs.input_ids[: indices.num_tokens],
            self._model.decoder.beside(indices.num_tokens),
        )
        if not self._position.is_last or not len(indices.sampling):
            return hidden, None
        has_logits = descriptor is not None and descriptor.is_decode
        kept = self._logits[: indices.num_tokens] if has_logits else hidden
        if selects and keep is None:
            kept = kept.index_select(0, batch.logits_tokens)
        return hidden, kept if has_logits else self._model.decoder.logits(kept)

    def _layers(self, start: Tensor, keep: Tensor | None) -> Pausing[Tensor]:
        return self._model.decoder.forward(start, self._inputs.positions[: len(start)], None, self._backend, keep)

    def _replay(self, start: Tensor, descriptor: BatchDescriptor) -> Tensor:
        """Return the hidden states of a step without padding, if its graph leaves any."""
        tokens = len(start)
        if not self._position.is_first:
            self._start[:tokens].copy_(start)
            if tokens < descriptor.tokens:  # layers add to their input: padding would grow with every step
                self._start[tokens : descriptor.tokens].zero_()
        graphs = self._graphs if self._adapters is None or not self._adapters.active else self._adapted_graphs
        graphs.replay(descriptor)
        return self.hidden[:tokens]

    def _captured(self, descriptor: BatchDescriptor, padding: AttentionBatch) -> None:
        """Run the layers, and compute the logits, that the graph of this size captures."""
        self._backend.plan(padding, graph=descriptor.longest)
        tokens = descriptor.tokens
        start = self._inputs.input_ids if self._position.is_first else self._start
        hidden = complete(self._layers(start[:tokens], None))
        if descriptor.is_decode and self._position.is_last:
            self._model.decoder.write_logits(hidden, self._logits[:tokens])
        if self._keeps_hidden or not (descriptor.is_decode and self._position.is_last):
            self.hidden[:tokens].copy_(hidden)
