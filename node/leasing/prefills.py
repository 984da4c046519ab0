"""The prompts of decode nodes on P: each one is an object, from its arrival until its lease ends.

A pull is complete as soon as it arrives, with the blocks that the prefix cache has.

    arrives ─► computed, part by part ─► complete ─► decodes ahead ─┐
       │            │                       │                       ▼
       └────────────┴── fails, cancelled ───┴──► only its lease ──► its lease ends: its blocks are free

``Prefills`` holds them by their leases, the only dict of prompts, and drives the leases' clock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from node.engine_client import EngineClient
from node.leasing.leases import Lease, LeaseId, LeaseState, LeaseTable
from node.leasing.prefill_trace import PrefillTrace
from node.request_events import Event, error_of
from pdserve.errors import DeadlineExceeded, EngineCrashed, PdserveError, PeerError
from pdserve.ipc.messages import (
    Cancel,
    DecodeAheadEnded,
    FreeLease,
    LastChunk,
    LeaseCached,
    Leased,
    Mode,
    Prefilled,
    Refused,
    Submit,
)
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import FinishReason, TokenLogprobs
from pdserve.rpc.errors import failure_to_pb
from pdserve.rpc.protobuf import logprobs_to_pb
from pdserve.sampling_params import SamplingParams
from pdserve.state import NO_SLOT

_log = logging.getLogger(__name__)

_MAX_STEP_SECONDS = 0.05  # of a step that only decodes


class Prefill(Lease):
    """A prompt in the engine, with its lease. ``send`` gets its events for D."""

    def __init__(
        self,
        lease: LeaseId,
        prefills: Prefills,
        *,
        trace: PrefillTrace,
        send: Callable[[pb.PrefillEvent], None],
    ) -> None:
        super().__init__(lease)
        self.trace = trace
        self.cancelled = False  # only its lease remains
        self.rid = prefills.engine.open(self)
        self._prefills = prefills
        self._send_event = send
        self._samples: list[pb.SampledToken] = []  # by choice, until the last part
        self._prefilled = Prefilled(self.rid, 0, 0.0)
        self._pull = False
        self._decodes_ahead = True  # or will, until the engine reports the end
        self._deferred: Callable[[], None] | None = None  # until the step in flight has ended
        self._timer: asyncio.TimerHandle | None = None
        prefills.table.accept(self)

    def submit(
        self, request: pb.PrefillRequest, *, token_ids: bytes, sampling: SamplingParams, decode_ahead: int
    ) -> None:
        """Send the prompt to the engine, to decode at most ``decode_ahead`` tokens after the first.

        If it is a pull, have the engine lease what is cached instead.
        """
        if request.timeout_ms:
            seconds = request.timeout_ms / 1000
            self._timer = asyncio.get_running_loop().call_later(seconds, self._on_deadline, seconds)
        if request.cached_only:
            self._decodes_ahead = False
            self._pull = True
            pull = LeaseCached(
                rid=self.rid,
                token_ids=token_ids,
                cache_salt=request.cache_salt,
                skip_tokens=request.skip_tokens,
                kv_layers=request.kv_layers,
            )
            self._prefills.engine.send(pull)
            return
        submit = Submit(
            rid=self.rid,
            token_ids=token_ids,
            sampling=sampling,
            mode=Mode.LEASE,
            cache_salt=request.cache_salt,
            priority=request.priority,
            skip_tokens=request.skip_tokens,
            decode_ahead=decode_ahead,
            client=request.client,
            urgent=request.urgent,
            kv_layers=request.kv_layers,
        )
        self._prefills.engine.send(submit)

    def after_step(self, action: Callable[[], None]) -> None:
        """Run ``action`` after the next step decoded ahead, or at once if there will be none.

        That step began before D could begin the same step. But a step with prompts is longer than D's. A stalled
        engine delays ``action`` by at most the length of a step.
        """
        self._run_deferred()
        if not (self.complete and self._decodes_ahead) or self._prefills.engine.status.backlog:
            action()
            return
        self._deferred = action
        self._timer = asyncio.get_running_loop().call_later(_MAX_STEP_SECONDS, self._run_deferred)

    def cancel(self) -> None:
        """Stop the computation without further events. Announced blocks stay leased."""
        self.cancelled = True
        self._stop()
        self._prefills.engine.send(Cancel(self.rid))
        self._prefills.end_ungranted(self)
        self._run_deferred()

    def fail(self, error: PdserveError) -> None:
        """Cancel the prompt, and tell D why."""
        self.trace.on_failed(error)
        self.cancel()
        self._send(failed=failure_to_pb(error))
        self._prefills.on_change()

    def on_lease_end(self, state: LeaseState) -> None:
        """The lease has ended and the blocks are free."""
        if not self.cancelled:
            if not self.complete:
                error = PeerError("the lease ended before all of its blocks were announced")
                self.trace.on_failed(error)
                self._send(failed=failure_to_pb(error))
            self._stop()
            self._run_deferred()
        self.trace.on_lease_end(state)

    # ------------------------------------------------------------ events of the engine

    def on_event(self, event: Event) -> None:
        match event:
            case Prefilled():
                self._prefilled = event
            case LastChunk():
                self._send(last_chunk=pb.LastChunk(ends_in_ms=round(event.seconds * 1000)))
            case DecodeAheadEnded():
                self._decodes_ahead = False
                self._run_deferred()
            case Leased(block_ids=()):
                self._on_nothing_cached()
            case Leased() if self._prefills.announce(self, event.last):
                self._on_part(event)
            case Refused():
                error = error_of(event)
                # Later, only tokens decoded ahead are missing. D needs none of them, but must know of a crash.
                if not self.complete or isinstance(error, EngineCrashed):
                    self.fail(error)

    def on_token(self, choice: int, token_id: int, finish: FinishReason | None, logprobs: TokenLogprobs | None) -> None:
        sample = pb.SampledToken(token_id=token_id, logprobs=logprobs_to_pb(logprobs) if logprobs else None)
        self._decodes_ahead = finish is None
        if self.complete:
            self._send(next_token=sample)
        else:
            self._samples.append(sample)
        if self._deferred is not None:  # after the other tokens of this step
            asyncio.get_running_loop().call_soon(self._run_deferred)

    def _on_part(self, part: Leased) -> None:
        """Announce blocks. The first token of each choice comes with the last part."""
        self.trace.on_part(part.num_tokens, len(part.block_ids))
        if self.complete:
            self._stop_timer()
            if self._pull:
                self.trace.on_pulled(part.num_tokens)
            else:
                self._on_computed()
        ready = pb.KVReady(
            lease_ms=int(self._prefills.table.seconds * 1000),
            block_ids=part.block_ids,
            num_tokens=part.num_tokens,
            digests=part.digests,
            state_slot=None if part.state_slot == NO_SLOT else part.state_slot,
        )
        self._send(kv_ready=ready)
        if self.complete:
            self._send(finished=pb.Finished())

    def _on_computed(self) -> None:
        done = self._prefilled
        self.trace.on_computed(done.queued, done.cached_tokens)
        first = pb.FirstTokens(choices=self._samples, cached_tokens=done.cached_tokens, queued_ms=done.queued * 1000)
        self._send(first_tokens=first)

    def _on_nothing_cached(self) -> None:
        """End a pull without blocks: nothing was promised."""
        self.trace.on_pulled(0)
        self.cancel()
        self._send(finished=pb.Finished())
        self._prefills.on_change()

    # ------------------------------------------------------------ parts of these

    def _send(self, **kind: Any) -> None:
        """Queue an event for D; ``kind`` is the field that is set."""
        self._send_event(pb.PrefillEvent(request=self.id.request, **kind))

    def _on_deadline(self, seconds: float) -> None:
        text = f"the prompt was not computed within the {seconds:.3g} s left of its request's timeout"
        self.fail(DeadlineExceeded(text))

    def _run_deferred(self) -> None:
        action, self._deferred = self._deferred, None
        if action is not None:
            self._stop_timer()
            action()

    def _stop(self) -> None:
        self._decodes_ahead = False
        self._prefills.engine.close(self.rid)
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Prefills:
    """The prompts of all decode nodes. Keeps leases, their expiry and the engine's leased blocks consistent.

    ``on_change`` is called after each prompt and each lease that ends.
    """

    def __init__(self, engine: EngineClient, seconds: float, guard: float) -> None:
        """Leases last ``seconds``; their blocks are kept ``guard`` seconds longer."""
        self.engine = engine
        self.table: LeaseTable[Prefill] = LeaseTable(seconds, guard)
        self.on_change: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def idle(self) -> bool:
        return not len(self.table)

    def of_stream(self, stream: int) -> Iterator[Prefill]:
        """Yield the prompts of a stream that are computed or decode ahead."""
        return (prefill for prefill in self.table if prefill.id.stream == stream and not prefill.cancelled)

    def announce(self, prefill: Prefill, complete: bool) -> bool:
        """Lease more blocks; return False if the lease has ended and they must not be announced to D."""
        active = self.table.announce(prefill.id, complete, time.monotonic())
        self._set_timer()
        return active

    def extend(self, lease: LeaseId) -> float:
        """Extend a lease; return the seconds that it lasts at least, 0 if it has ended."""
        return self.table.extend(lease, time.monotonic())

    def release(self, lease: LeaseId) -> bool:
        """End a lease for D; return whether it stood until now."""
        prefill = self.table.get(lease)
        stood, _ = self.table.release(lease)
        if prefill is not None:
            self._free(prefill, LeaseState.RELEASED if stood else LeaseState.ABORTED)
        return stood

    def end_ungranted(self, prefill: Prefill) -> None:
        """End the lease of a cancelled prompt, unless blocks have been announced."""
        if self.table.cancel(prefill.id):
            self._free(prefill, LeaseState.ABORTED)

    def end_all(self) -> None:
        """End the granted leases, as their blocks are about to be lost: no release of them says that they stood."""
        for prefill in self.table.expire(math.inf):
            self._free(prefill, LeaseState.EXPIRED)

    def close(self) -> None:
        """End the traces of all leases. Streams that gRPC cancels afterwards change nothing."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._closed:
            self._closed = True
            for prefill in self.table:
                prefill.trace.on_lease_end(LeaseState.ABORTED)

    def _set_timer(self) -> None:
        when = self.table.next_expiry()
        if self._timer is None and when is not None:
            delay = max(0.0, when - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        for prefill in self.table.expire(time.monotonic()):
            trace = prefill.trace
            text = "the lease of request %s expired: its decode node neither released nor extended it"
            _log.warning(text, trace.request_id, extra=trace.log_fields)
            self._free(prefill, LeaseState.EXPIRED)
        self._set_timer()

    def _free(self, prefill: Prefill, state: LeaseState) -> None:
        """Free the blocks of a lease that has ended, and stop its computation."""
        if self._closed:
            return
        self.engine.send(FreeLease(prefill.rid))
        prefill.on_lease_end(state)
        self.on_change()
