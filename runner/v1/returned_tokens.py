"""Tokens from the last pipeline stage, in the V1 runner of the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from pdserve.records import StepPlan
from runner.distributed.pipeline_stages import TensorReceiver
from runner.distributed.token_return import TokenReturn
from runner.step_parts import StepFeature, StepPart
from runner.v1.sequences import SequenceTable

if TYPE_CHECKING:
    from runner.v1.runner import HostBatch


class HostReturnedTokens(StepFeature["HostBatch"]):
    """Writes tokens into the SequenceTable before the first step that needs them. The host waits for them."""

    def __init__(self, receiver: TensorReceiver, sequences: SequenceTable) -> None:
        self._token_return, self._sequences = TokenReturn(receiver), sequences

    def remove(self, seq: int) -> None:
        self._token_return.forget(seq)

    def part(self, plan: StepPlan) -> StepPart[HostBatch] | None:
        return _Part(self._token_return, self._sequences, plan) if plan.scheduled else None


@dataclass
class _Part(StepPart["HostBatch"]):
    token_return: TokenReturn
    sequences: SequenceTable
    plan: StepPlan

    def before_forward(self, batch: HostBatch) -> None:
        for message in self.token_return.due(self.plan.scheduled):
            with self.token_return.take() as tokens:
                token_ids = tokens.cpu().numpy()[message.wanted]
            rows, positions = message.rows[message.wanted], message.positions[message.wanted]
            self.sequences.token_ids[rows, positions] = token_ids

    def after_forward(self, batch: HostBatch, hidden: Tensor) -> None:
        rows = batch.sampling_rows
        seqs = [self.plan.scheduled[i].seq for i in batch.sampling]
        self.token_return.expect(seqs, rows, self.sequences.num_tokens[rows])
