"""Tokens from the last pipeline stage, in the V2 runner of the first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pdserve.records import StepPlan
from runner.distributed.pipeline_stages import TensorReceiver
from runner.distributed.token_return import ReturnedTokens
from runner.kernels.step import TOKEN_CHUNK, put_tokens_kernel
from runner.step_parts import StepPart
from runner.v2.device_state import DeviceState, StagedWrites
from runner.v2.input_batch import InputBatch
from runner.v2.request_states import RequestStates


class DeviceReturnedTokens(ReturnedTokens[InputBatch]):
    """Puts tokens into the device's state before the first step that needs them. The host does not wait."""

    def __init__(
        self, receiver: TensorReceiver, requests: RequestStates, state: DeviceState, writes: StagedWrites
    ) -> None:
        super().__init__(receiver)
        self.requests = requests
        self.state = state
        self._writes = writes

    def part(self, plan: StepPlan) -> StepPart[InputBatch] | None:
        if not plan.scheduled:
            return None
        messages = self.due(plan.scheduled)
        offsets = [self.state.token_offsets(m.rows, m.positions, m.wanted) for m in messages]
        for token_offsets in offsets:
            self._writes.stage(token_offsets)
        return _Part(self, offsets)


@dataclass
class _Part(StepPart[InputBatch]):
    feature: DeviceReturnedTokens
    offsets: list[NDArray[np.int32]]  # by message: places of its tokens in the state

    def before_forward(self, batch: InputBatch) -> None:
        for offsets, offsets_at in zip(self.offsets, batch.sent.extra_at, strict=True):
            with self.feature.receiver.take() as tokens:
                put_tokens_kernel[(-(-len(offsets) // TOKEN_CHUNK),)](
                    self.feature.state.flat, batch.sent.words, offsets_at, tokens, len(offsets), CHUNK=TOKEN_CHUNK
                )

    def after_forward(self, batch: InputBatch, hidden: Tensor) -> None:
        indices = batch.indices
        slots = indices.rows[indices.continued]  # tokens of decodes with drafts come with their next plan
        self.feature.expect(indices.continued_sequences, slots, self.feature.requests.num_tokens[slots] - 1)
