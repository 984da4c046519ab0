"""One prompt in P's engine, whose blocks are leased part by part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from node.engine_client import EngineClient
from node.request_events import Event, error_of
from pdserve.errors import DeadlineExceeded, EngineCrashed, PdserveError, PeerError
from pdserve.ipc.messages import Cancel, DecodeAheadEnded, LastChunk, Leased, Mode, Prefilled, Refused, Submit
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import FinishReason, SamplingParams, TokenLogprobs
from pdserve.rpc.protobuf import logprobs_to_pb
from prefill_node.lease_manager import LeaseManager
from prefill_node.leases import LeaseId
from prefill_node.prefill_trace import PrefillTrace

_MAX_STEP_SECONDS = 0.05  # of a step that only decodes


class PendingPrefill:
    """A prompt of ``num_tokens``, from its submission until its lease ends or ``cancel``.

    ``send`` takes the field of a pb.PrefillEvent. ``on_end`` is called when the lease has ended, with an error if that
    was before the last part: an error with which the engine refuses the prompt, DeadlineExceeded after the request's
    timeout, or PeerError.
    """

    def __init__(
        self,
        engine: EngineClient,
        leases: LeaseManager,
        lease: LeaseId,
        num_tokens: int,
        timeout: float,
        send: Callable[..., None],
        on_end: Callable[[PdserveError | None], None],
        trace: PrefillTrace,
    ) -> None:
        """``timeout`` is in seconds; 0 is none."""
        self._engine = engine
        self._leases = leases
        self._lease = lease
        self._rid = engine.open(self)
        self.complete = False  # the last part has been announced
        self._num_tokens = num_tokens
        self._samples: list[pb.SampledToken] = []  # by choice, until the last part
        self._prefilled = Prefilled(self._rid, 0, 0.0)
        self._decodes_ahead = True  # or will, until the engine reports the end
        self._deferred: Callable[[], None] | None = None  # until the step in flight has ended
        self._send = send
        self._on_end = on_end
        self._trace = trace
        late = DeadlineExceeded(f"the prompt was not computed within the {timeout:.3g} s left of its request's timeout")
        self._timer = asyncio.get_running_loop().call_later(timeout, self._fail, late) if timeout else None
        leases.accept(lease, self._rid, self._on_lease_end, trace)

    def submit(self, request: pb.PrefillRequest, sampling: SamplingParams, decode_ahead: int) -> None:
        """Send the prompt to the engine, to decode at most ``decode_ahead`` tokens after the first."""
        self._engine.send(
            Submit(
                *(self._rid, request.token_ids, sampling, Mode.LEASE, request.cache_salt),
                *(request.priority, request.skip_tokens, decode_ahead),
                client=request.client,
                urgent=request.urgent,
            )
        )

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
        """Stop the computation without further events. Announced blocks stay leased."""
        self._stop()
        self._engine.send(Cancel(self._rid))
        self._leases.cancel(self._lease)
        self._run_deferred()

    def on_event(self, event: Event) -> None:
        match event:
            case Prefilled():
                self._prefilled = event
            case LastChunk():
                self._send(last_chunk=pb.LastChunk())
            case DecodeAheadEnded():
                self._decodes_ahead = False
                self._run_deferred()
            case Leased() if self._leases.announce(self._lease, event.num_tokens == self._num_tokens):
                self._on_part(event)
            case Refused():
                error = error_of(event)
                # Later, only tokens decoded ahead are missing. D needs none of them, but must know of a crash.
                if not self.complete or isinstance(error, EngineCrashed):
                    self._fail(error)

    def on_token(self, choice: int, token_id: int, finish: FinishReason | None, logprobs: TokenLogprobs | None) -> None:
        sample = pb.SampledToken(token_id=token_id, logprobs=logprobs_to_pb(logprobs) if logprobs else None)
        self._decodes_ahead = finish is None
        if self.complete:
            self._send(next_token=sample)
        else:
            self._samples.append(sample)
        self._run_deferred()

    def _run_deferred(self) -> None:
        action, self._deferred = self._deferred, None
        if action is not None:
            self._stop_timer()
            action()

    def _on_part(self, part: Leased) -> None:
        """Announce blocks. The first token of each choice comes with the last part."""
        self._trace.on_part(part.num_tokens, len(part.block_ids))
        self.complete = part.num_tokens == self._num_tokens
        done = self._prefilled
        if self.complete:
            self._stop_timer()
            self._trace.on_computed(done.queued, done.cached_tokens)
            first = pb.FirstTokens(
                choices=self._samples, cached_tokens=done.cached_tokens, queued_ms=done.queued * 1000
            )
            self._send(first_tokens=first)
        ready = pb.KVReady(
            lease_ms=int(self._leases.table.seconds * 1000),
            block_ids=part.block_ids,
            num_tokens=part.num_tokens,
            digests=part.digests,
        )
        self._send(kv_ready=ready)
        if self.complete:
            self._send(finished=pb.Finished())

    def _on_lease_end(self) -> None:
        error = None
        if not self.complete:
            error = PeerError("the lease ended before all of its blocks were announced")
            self._trace.on_failed(error)
        self._stop()
        self._on_end(error)
        self._run_deferred()

    def _fail(self, error: PdserveError) -> None:
        self._trace.on_failed(error)
        self.cancel()
        self._on_end(error)

    def _stop(self) -> None:
        self._decodes_ahead = False
        self._engine.close(self._rid)
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
