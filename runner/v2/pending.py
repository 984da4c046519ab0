"""Tokens on their way to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.records import Sample, StepOutput, TokenLogprobs
from runner.v2.sampler import Sampled, SamplingBatch


@dataclass(frozen=True)
class TokensInFlight:
    """A pdserve.protocols.PendingStep. The copy was ordered behind the step, on a stream of its own."""

    step: int
    batch: SamplingBatch
    copied: Sampled  # on the host, complete when ``arrived`` has happened
    arrived: torch.cuda.Event | None  # None where the device is the host

    def result(self) -> StepOutput:
        if self.arrived is not None:
            self.arrived.synchronize()
        logprobs = self._logprobs()
        tokens = enumerate(self.copied.tokens.tolist())
        return StepOutput(self.step, tuple([Sample(token, logprobs.get(draw)) for draw, token in tokens]))

    def _logprobs(self) -> dict[int, TokenLogprobs]:
        """By draw."""
        copied = self.copied
        if copied.logprobs is None:
            return {}
        assert copied.top_ids is not None
        assert copied.top_logprobs is not None
        rows = zip(copied.logprobs.tolist(), copied.top_ids.tolist(), copied.top_logprobs.tolist(), strict=True)
        found = {}
        for draw, (logprob, ids, values) in zip(self.batch.logprob_draws, rows, strict=True):
            wanted = self.batch.num_alternatives[draw]
            found[draw] = TokenLogprobs(logprob, tuple(ids[:wanted]), tuple(values[:wanted]))
        return found


class ToHost:
    """Copies results to the host beside the device's main stream, so that neither the next step nor the host waits."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, step: int, batch: SamplingBatch, sampled: Sampled) -> TokensInFlight:
        if self._stream is None:
            return TokensInFlight(step, batch, sampled, None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copied = sampled.each(self._copy)
            arrived = torch.cuda.Event()
            arrived.record()
        return TokensInFlight(step, batch, copied, arrived)

    def _copy(self, tensor: Tensor) -> Tensor:
        assert self._stream is not None
        tensor.record_stream(self._stream)  # its memory is not reused before this copy is done
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
