"""One prompt in P's engine, whose blocks are leased part by part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from engine.frontend.engine_client import EngineClient, Event, error_of
from engine.ipc.messages import Cancel, DecodeAheadEnded, Leased, Mode, Prefilled, Refused, Submit
from pdserve.errors import DeadlineExceeded, PdserveError, PeerError
from pdserve.records import FinishReason, Sample, SamplingParams, TokenLogprobs
from prefill_node.lease_manager import LeaseManager
from prefill_node.prefill_trace import PrefillTrace

_MAX_STEP_SECONDS = 0.05  # of a step that only decodes


class PrefillListener(Protocol):
    """Receives the results of a prompt."""

    def on_part(self, prefill: PendingPrefill, part: Leased) -> None:
        """Blocks were leased, in the same callback. The last part comes with the first token of each choice."""

    def on_token(self, sample: Sample) -> None:
        """A token that was decoded ahead, after the last part."""

    def on_end(self, error: PdserveError | None) -> None:
        """The lease has ended; with an error, before the last part."""


class PendingPrefill:
    """A prompt of ``num_tokens``, from its submission until its lease ends or ``cancel``.

    The errors are those with which the engine refuses the prompt, DeadlineExceeded after ``timeout`` seconds (0: none),
    and PeerError when the lease ends before the last part.
    """

    def __init__(
        self,
        engine: EngineClient,
        leases: LeaseManager,
        num_tokens: int,
        timeout: float,
        listener: PrefillListener,
        trace: PrefillTrace,
    ) -> None:
        self._engine = engine
        self._leases = leases
        self.rid = engine.open(self)
        self.num_tokens = num_tokens
        self.samples: list[Sample] = []  # by choice, until the last part
        self.cached_tokens = 0
        self.queued = 0.0  # seconds before its first step
        self.complete = False  # the last part has been announced
        self._num_choices = 0
        self._decodes_ahead = True  # or will, until the engine reports the end
        self._deferred: Callable[[], None] | None = None  # until the step in flight has ended
        self._listener = listener
        self._trace = trace
        late = DeadlineExceeded(f"the prompt was not computed within the {timeout:.3g} s left of its request's timeout")
        self._timer = asyncio.get_running_loop().call_later(timeout, self._fail, late) if timeout else None
        leases.accept(self.rid, self._on_lease_end, trace)

    def submit(
        self, token_ids: bytes, sampling: SamplingParams, cache_salt: str, priority: int, skip_tokens: int, ahead: int
    ) -> None:
        """Send the prompt to the engine, to decode at most ``ahead`` tokens after the first."""
        self._num_choices = sampling.n
        self._engine.send(Submit(self.rid, token_ids, sampling, Mode.LEASE, cache_salt, priority, skip_tokens, ahead))

    def after_step(self, action: Callable[[], None]) -> None:
        """Run ``action`` after the next token decoded ahead, or at once if there will be none.

        The step of that token began before D could begin the same step. A stalled engine delays ``action`` by at most
        the length of a step.
        """
        self._run_deferred()
        if not (self.complete and self._decodes_ahead):
            action()
            return
        self._deferred = action
        self._timer = asyncio.get_running_loop().call_later(_MAX_STEP_SECONDS, self._run_deferred)

    def cancel(self) -> None:
        """Stop the computation, without events to the listener. Announced blocks stay leased."""
        self._stop()
        self._engine.send(Cancel(self.rid))
        self._leases.cancel(self.rid)
        self._run_deferred()

    def on_event(self, event: Event) -> None:
        match event:
            case Prefilled(_, self.cached_tokens, self.queued):
                pass
            case DecodeAheadEnded():
                self._decodes_ahead = False
                self._run_deferred()
            case Leased() if self._leases.announce(self.rid, event.num_tokens == self.num_tokens):
                self._on_part(event)
            case Refused() if not self.complete:  # later, only tokens decoded ahead are missing, which D does not need
                self._fail(error_of(event))

    def on_token(self, choice: int, token_id: int, finish: FinishReason | None, logprobs: TokenLogprobs | None) -> None:
        sample = Sample(token_id, logprobs)
        self._decodes_ahead = finish is None
        if self.complete:
            self._listener.on_token(sample)
        else:
            self.samples.append(sample)
        self._run_deferred()

    def _run_deferred(self) -> None:
        action, self._deferred = self._deferred, None
        if action is not None:
            self._stop_timer()
            action()

    def _on_part(self, part: Leased) -> None:
        self._trace.on_part(part.num_tokens, len(part.block_ids))
        self.complete = part.num_tokens == self.num_tokens
        if self.complete:
            self._stop_timer()
            self._trace.on_computed(self.queued, self.cached_tokens)
        ahead = self.samples[self._num_choices :]  # with digests, the last part comes a step after the first tokens
        del self.samples[self._num_choices :]
        self._listener.on_part(self, part)
        for sample in ahead:
            self._listener.on_token(sample)

    def _on_lease_end(self) -> None:
        error = None
        if not self.complete:
            error = PeerError(f"lease {self.rid} ended before all of its blocks were announced")
            self._trace.on_failed(error)
        self._stop()
        self._listener.on_end(error)
        self._run_deferred()

    def _fail(self, error: PdserveError) -> None:
        self._trace.on_failed(error)
        self.cancel()
        self._listener.on_end(error)

    def _stop(self) -> None:
        self._decodes_ahead = False
        self._engine.close(self.rid)
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
