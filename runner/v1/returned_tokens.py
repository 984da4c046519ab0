"""Tokens from the last pipeline stage, in the V1 runner of the first."""

from __future__ import annotations

from torch import Tensor

from pdserve.records import StepPlan
from runner.distributed.pipeline_stages import TensorReceiver
from runner.distributed.token_return import ReturnedTokens
from runner.step_parts import StepPart
from runner.v1.sequences import HostBatch, SequenceTable


class HostReturnedTokens(ReturnedTokens[HostBatch], StepPart[HostBatch]):
    """Writes tokens into the SequenceTable before the first step that needs them. The host waits for them.

    It is the part of every step with a batch.
    """

    def __init__(self, receiver: TensorReceiver, sequences: SequenceTable) -> None:
        super().__init__(receiver)
        self._sequences = sequences

    def part(self, plan: StepPlan) -> StepPart[HostBatch] | None:
        return self if plan.scheduled else None

    def before_forward(self, batch: HostBatch) -> None:
        for message in self.due(batch.scheduled):
            with self.receiver.take() as tokens:
                token_ids = tokens.cpu().numpy()[message.wanted]
            rows = message.rows[message.wanted]
            positions = message.positions[message.wanted]
            self._sequences.token_ids[rows, positions] = token_ids

    def after_forward(self, batch: HostBatch, hidden: Tensor) -> None:
        rows = batch.rows[batch.continued]  # what decodes with drafts yield comes with their next plan
        self.expect(batch.continued_sequences, rows, self._sequences.num_tokens[rows])
