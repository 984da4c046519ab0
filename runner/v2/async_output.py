"""Sampled tokens on their way to the host, in a ring of pinned buffers: allocating takes longer than copying."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.logprobs import TokenLogprobs
from pdserve.records import StepOutput, StepPlan
from runner.sampling.sampler import token_logprobs
from runner.sampling.verification import without_rejected
from runner.v2.device_sampler import SamplerOutput
from runner.v2.sampling_metadata import SamplingMetadata


@dataclass(frozen=True)
class AsyncOutput:
    """A pdserve.protocols.PendingStep. Its copy follows the step, on a stream of its own."""

    plan: StepPlan
    metadata: SamplingMetadata
    copied: SamplerOutput  # on the host, complete once ``arrived`` has happened
    arrived: torch.cuda.Event | None  # None if the device is the host
    source: SamplerOutput  # on the device; kept alive until the copy is complete

    def done(self) -> bool:
        return self.arrived is None or self.arrived.query()

    def result(self) -> StepOutput:
        if self.arrived is not None:
            self.arrived.synchronize()
        num_top = self.metadata.num_logprobs
        logprobs: dict[int, TokenLogprobs] = {}  # by sample
        if self.copied.logprobs is not None:
            logprobs = dict(zip(num_top, token_logprobs(self.copied.logprobs, num_top.values()), strict=True))
        token_ids = tuple(self.copied.tokens.tolist())
        output = StepOutput(self.plan.step, token_ids=token_ids, drafts=self._drafts(), logprobs=logprobs)
        return without_rejected(self.plan, output) if self.plan.drafts and self.plan.num_drafts else output

    def _drafts(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        if self.copied.drafts is None:
            return ()
        sampled = [item.seq for item in self.plan.scheduled if item.num_samples]
        return tuple(zip(sampled, map(tuple, self.copied.drafts.tolist()), strict=True))


class _PinnedBuffer:
    """Host memory and events for the tokens of one step."""

    def __init__(self, num_samples: int) -> None:
        self.tokens = torch.empty(num_samples, dtype=torch.int32, pin_memory=True)
        self.sampled = torch.cuda.Event()
        self.arrived = torch.cuda.Event()


class AsyncOutputCopy:
    """Copies results to the host on a side stream, so neither the next step nor the host waits."""

    def __init__(self, device: torch.device, num_samples: int, max_in_flight: int) -> None:
        """Reserve buffers for ``num_samples`` tokens; a step with more tokens gets a larger one."""
        self._stream: torch.cuda.Stream | None = None
        self._buffers: list[_PinnedBuffer] = []
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._buffers = [_PinnedBuffer(num_samples) for _ in range(max_in_flight + 1)]

    def start(self, plan: StepPlan, metadata: SamplingMetadata, sampled: SamplerOutput) -> AsyncOutput:
        """Start the copy behind the current stream."""
        if self._stream is None:
            return AsyncOutput(plan, metadata, sampled, None, sampled)
        buffer = self._next_buffer(sampled.tokens.shape[0])
        buffer.sampled.record()
        self._stream.wait_event(buffer.sampled)
        with torch.cuda.stream(self._stream):
            copied = sampled.map(lambda tensor: _copy(tensor, buffer.tokens if tensor is sampled.tokens else None))
            buffer.arrived.record()
        return AsyncOutput(plan, metadata, copied, buffer.arrived, sampled)

    def _next_buffer(self, num_samples: int) -> _PinnedBuffer:
        """Return a buffer whose last tokens were read: there are more buffers than steps in flight."""
        buffer = self._buffers.pop(0)
        if len(buffer.tokens) < num_samples:
            buffer = _PinnedBuffer(2 * num_samples)
        self._buffers.append(buffer)
        return buffer


def _copy(tensor: Tensor, into: Tensor | None) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) if into is None else into[: tensor.shape[0]]
    return host.copy_(tensor, non_blocking=True)
