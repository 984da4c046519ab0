"""Tokens on their way to the host, in pinned memory that is used in turn: allocating takes longer than copying."""

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
    source: Sampled  # on the device, kept until then

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


class _Landing:
    """Where the tokens of one step land."""

    def __init__(self, draws: int) -> None:
        self.tokens = torch.empty(draws, dtype=torch.int32, pin_memory=True)
        self.sampled, self.arrived = torch.cuda.Event(), torch.cuda.Event()


class ToHost:
    """Copies results to the host beside the device's main stream, so that neither the next step nor the host waits."""

    def __init__(self, device: torch.device, draws: int, max_in_flight: int) -> None:
        """Made for steps of ``draws`` tokens; takes more, too."""
        self._stream: torch.cuda.Stream | None = None
        self._landings: list[_Landing] = []
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._landings = [_Landing(draws) for _ in range(max_in_flight + 1)]

    def send(self, step: int, batch: SamplingBatch, sampled: Sampled) -> TokensInFlight:
        if self._stream is None:
            return TokensInFlight(step, batch, sampled, None, sampled)
        landing = self._next_landing(sampled.tokens.shape[0])
        landing.sampled.record()
        self._stream.wait_event(landing.sampled)
        with torch.cuda.stream(self._stream):
            copied = sampled.each(lambda tensor: _copy(tensor, landing.tokens if tensor is sampled.tokens else None))
            landing.arrived.record()
        return TokensInFlight(step, batch, copied, landing.arrived, sampled)

    def _next_landing(self, draws: int) -> _Landing:
        """One whose last tokens have been taken: there are more landings than steps in flight."""
        landing = self._landings.pop(0)
        if len(landing.tokens) < draws:
            landing = _Landing(2 * draws)
        self._landings.append(landing)
        return landing


def _copy(tensor: Tensor, into: Tensor | None) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) if into is None else into[: tensor.shape[0]]
    return host.copy_(tensor, non_blocking=True)
