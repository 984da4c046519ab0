"""The forward pass of a step over the layers of a rank: by a CUDA graph where one fits, else as it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pdserve.config.node_config import NodeConfig
from pdserve.config.parallel import NO_LATE_MLPS, LateMLPs
from runner.attention import AttentionBackend
from runner.distributed.pipeline_stages import PipelineStages
from runner.loading.model_loader import LoadedModel
from runner.v2.graphs import StepGraphs, StepShape, decode_shapes, mixed_shapes
from runner.v2.inputs import StepInputs
from runner.v2.slots import BatchForm, ScheduledBatch


class Forward:
    """Graphs hold the layers only: what comes from other stages and goes to them is copied from and to their memory."""

    def __init__(
        self,
        config: NodeConfig,
        loaded: LoadedModel,
        backend: AttentionBackend,
        inputs: StepInputs,
        stages: PipelineStages,
    ) -> None:
        self._loaded, self._backend, self._inputs, self._stages = loaded, backend, inputs, stages
        self._place = config.place
        self._shapes = (
            *decode_shapes(config.max_num_seqs),
            *mixed_shapes(config.max_num_seqs, config.max_batch_tokens),
        )
        self._graphs = StepGraphs(())
        model, dtype, device = config.model, loaded.placement.dtype, loaded.device
        most = max(shape.tokens for shape in self._shapes) if config.cuda_graphs else 0
        # What graphs start with where there is a stage before, and what they leave behind: on the last stage logits of
        # steps of single tokens, else hidden states.
        self._start = torch.zeros(0 if self._place.is_first else most, model.hidden_size, dtype=dtype, device=device)
        self._hidden = torch.empty(most, model.hidden_size, dtype=dtype, device=device)
        rows = config.max_num_seqs if config.cuda_graphs and self._place.is_last else 0
        self._logits = torch.empty(rows, model.vocab_size, dtype=dtype, device=device)

    def capture(self, on_progress: Callable[[float], None], most: int | None = None) -> None:
        """Capture the graphs of all shapes, or of the ``most`` largest."""
        graphs = StepGraphs(tuple(sorted(self._shapes, key=lambda shape: -shape.tokens)[:most]))
        graphs.capture(
            lambda shape: self._backend.plan(self._inputs.padding(shape), graph=True), self._padded, on_progress
        )
        self._graphs = graphs

    def shape_for(self, form: BatchForm) -> StepShape | None:
        """That of the graph by which such a step is to be run, if there is one."""
        return self._graphs.shape_for(form.num_seqs, form.num_tokens)

    def run(self, batch: ScheduledBatch, last_tokens: Tensor, shape: StepShape | None, late: LateMLPs) -> Tensor:
        """Logits [sampling rows, vocab_size] on the last stage, nothing of use where none samples, and on other stages.

        The step's inputs have been built, padded to ``shape`` if that is given; then no MLP is ``late``.
        ``last_tokens`` are those of the rows that sample.
        """
        form = batch.form
        assert shape is None or late == NO_LATE_MLPS, "what is captured is the same in every step"
        keep = None if form.every_token_samples or not self._place.is_last else last_tokens
        if shape is None:
            self._backend.plan(self._inputs.attention_batch(batch))
        hidden = self._stages.compute(
            lambda start: self._layers(start, keep, late) if shape is None else self._replay(start, shape),
            self._inputs.input_ids[: form.num_tokens],
        )
        if not self._place.is_last or not len(form.sampling):
            return hidden
        if shape is not None and shape.singles:
            return self._logits[: form.num_tokens]
        if shape is not None and keep is not None:
            hidden = hidden.index_select(0, keep)
        return self._loaded.decoder.logits(hidden)

    def run_whole(self, batch: ScheduledBatch, last_tokens: Tensor, late: LateMLPs) -> tuple[Tensor, Tensor]:
        """The hidden states of all tokens [tokens, hidden_size], and the logits, on the last stage; without a graph."""
        tokens = batch.form.num_tokens
        self._backend.plan(self._inputs.attention_batch(batch))
        hidden = self._stages.compute(lambda start: self._layers(start, None, late), self._inputs.input_ids[:tokens])
        if not len(last_tokens):
            return hidden, hidden
        return hidden, self._loaded.decoder.logits(hidden.index_select(0, last_tokens))

    def _layers(self, start: Tensor, keep: Tensor | None, late: LateMLPs = NO_LATE_MLPS) -> Tensor:
        return self._loaded.decoder(start, self._inputs.positions[: len(start)], None, self._backend, keep, late)

    def _replay(self, start: Tensor, shape: StepShape) -> Tensor:
        """The hidden states of a step without padding, where the graph leaves any."""
        tokens = len(start)
        if not self._place.is_first:
            self._start[:tokens].copy_(start)
            if tokens < shape.tokens:  # layers add to what they start with: padding would grow with every step
                self._start[tokens : shape.tokens].zero_()
        self._graphs.replay(shape)
        return self._hidden[:tokens]

    def _padded(self, shape: StepShape) -> None:
        """What the graph of a shape captures."""
        tokens = shape.tokens
        hidden = self._layers((self._inputs.input_ids if self._place.is_first else self._start)[:tokens], None)
        if shape.singles and self._place.is_last:
            self._loaded.decoder.write_logits(hidden, self._logits[: shape.rows])
        else:
            self._hidden[:tokens].copy_(hidden)
