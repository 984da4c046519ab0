"""Prompts on their way through P's engine, and the leases they become, part by part."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from engine.frontend.engine_client import EngineClient, Event, error_of
from engine.ipc.messages import Cancel, DecodeAheadEnded, FreeLease, Leased, Mode, Prefilled, Refused, Submit
from pdserve.errors import DeadlineExceeded, PdserveError, PeerError
from pdserve.records import FinishReason, Sample, SamplingParams, TokenLogprobs
from prefill_node.leases import LeaseState, LeaseTable
from prefill_node.prefill_trace import PrefillTrace

_log = logging.getLogger(__name__)

_LONGEST_STEP = 0.05  # seconds, of those that only decode


class PrefillListener(Protocol):
    """Who is told what becomes of a prompt."""

    def on_part(self, prefill: PendingPrefill, part: Leased) -> None:
        """In the callback in which the engine has leased it."""

    def on_token(self, sample: Sample) -> None:
        """One after the first, of the only choice; after the last part."""

    def on_end(self, error: PdserveError | None) -> None:
        """The lease has ended; or, with an error, there will be no last part."""


class PendingPrefill:
    """One prompt of ``num_tokens``: its blocks part by part, with the last one the first token of each choice, and then
    the tokens that the engine samples until the peer has taken over.

    The lease begins with the first part, however slowly the peer takes them in. The error with which it may end is what
    the engine refused the prompt with, DeadlineExceeded after ``timeout`` seconds (0: none), or PeerError when the
    lease has ended before the last part. After the end, and after ``hang_up``, nothing more is told.
    """

    def __init__(
        self,
        engine: EngineClient,
        leases: Leases,
        num_tokens: int,
        timeout: float,
        listener: PrefillListener,
        course: PrefillTrace,
    ) -> None:
        self._engine = engine
        self._leases = leases
        self.rid = engine.open(self)
        self.num_tokens = num_tokens
        self.samples: list[Sample] = []  # by choice, while the prompt is computed
        self.cached_tokens = 0
        self.queued = 0.0  # seconds, before its first step
        self.complete = False  # the last part has been told
        self._num_choices = 0
        self._goes_ahead = True  # or will, as far as the engine has said
        self._then: Callable[[], None] | None = None  # to be done when it has got to the end of a step
        self._listener = listener
        self._course = course
        late = DeadlineExceeded(
            f"the prompt was not computed within the {timeout:.3g} s that were left of its request's"
        )
        self._timer = asyncio.get_running_loop().call_later(timeout, self._fail, late) if timeout else None
        leases.accept(self.rid, self._on_lease_end, course)

    def submit(
        self, token_ids: bytes, sampling: SamplingParams, cache_salt: str, priority: int, skip_tokens: int, ahead: int
    ) -> None:
        self._num_choices = sampling.n
        self._engine.send(Submit(self.rid, token_ids, sampling, Mode.LEASE, cache_salt, priority, skip_tokens, ahead))

    def settle(self, then: Callable[[], None]) -> None:
        """Do it when the token is told that is being sampled ahead of the peer; now if there is none.

        It began before the peer could begin with it. An engine that stands still is not waited for.
        """
        self._settled()
        if not (self.complete and self._goes_ahead):
            then()
            return
        self._then = then
        self._timer = asyncio.get_running_loop().call_later(_LONGEST_STEP, self._settled)

    def hang_up(self) -> None:
        """Stop it, wherever it is: nobody waits for it, or it was refused. What was announced stays leased."""
        self._stop()
        self._engine.send(Cancel(self.rid))
        self._leases.hang_up(self.rid)
        self._settled()

    def on_event(self, event: Event) -> None:
        match event:
            case Prefilled(_, self.cached_tokens, self.queued):
                pass
            case DecodeAheadEnded():
                self._goes_ahead = False
                self._settled()
            case Leased() if self._leases.announce(self.rid, event.num_tokens == self.num_tokens):
                self._on_part(event)
            case Refused() if not self.complete:  # else only what would follow is missing, which nobody relies on
                self._fail(error_of(event))

    def on_token(self, choice: int, token_id: int, finish: FinishReason | None, logprobs: TokenLogprobs | None) -> None:
        sample = Sample(token_id, logprobs)
        self._goes_ahead = finish is None
        if self.complete:
            self._listener.on_token(sample)
        else:
            self.samples.append(sample)
        self._settled()

    def _settled(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            self._stop_timer()
            then()

    def _on_part(self, part: Leased) -> None:
        self._course.on_part(part.num_tokens, len(part.block_ids))
        self.complete = part.num_tokens == self.num_tokens
        if self.complete:
            self._stop_timer()
            self._course.on_computed(self.queued, self.cached_tokens)
        ahead = self.samples[self._num_choices :]  # with digests a part is told a step later than it was computed
        del self.samples[self._num_choices :]
        self._listener.on_part(self, part)
        for sample in ahead:
            self._listener.on_token(sample)

    def _on_lease_end(self) -> None:
        error = None
        if not self.complete:
            error = PeerError(f"lease {self.rid} ended before all of its blocks were announced")
            self._course.on_failed(error)
        self._stop()
        self._listener.on_end(error)
        self._settled()

    def _fail(self, error: PdserveError) -> None:
        self._course.on_failed(error)
        self.hang_up()
        self._listener.on_end(error)

    def _stop(self) -> None:
        self._goes_ahead = False
        self._engine.close(self.rid)
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Leases:
    """The lease table, its timer and the engine that holds the blocks, kept in step.

    ``on_end`` is called when a lease has ended.
    """

    def __init__(self, engine: EngineClient, table: LeaseTable) -> None:
        self._engine = engine
        self.table = table
        self.on_end: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: dict[int, Callable[[], None]] = {}  # by lease: who is to be told that it has ended
        self._courses: dict[int, PrefillTrace] = {}  # by lease

    @property
    def idle(self) -> bool:
        """Nothing is leased."""
        return not len(self.table)

    def accept(self, lease: int, on_end: Callable[[], None], course: PrefillTrace) -> None:
        """A prompt is to become a lease. ``on_end`` is called when that has ended, unless by ``hang_up``."""
        self.table.accept(lease)
        self._waiting[lease] = on_end
        self._courses[lease] = course

    def announce(self, lease: int, complete: bool) -> bool:
        """A peer is to be told of more blocks. False when the lease has ended: it must not be."""
        stands = self.table.announce(lease, complete, time.monotonic())
        self._arm()
        return stands

    def extend(self, epoch: str, lease: int) -> float:
        """Keep a lease. Returns for how many seconds from now at least; 0 when it has ended."""
        return self.table.extend(epoch, lease, time.monotonic())

    def release(self, epoch: str, lease: int) -> bool:
        """Give a lease back. Returns whether it was kept until then."""
        kept, free = self.table.release(epoch, lease)
        if free:
            self._free(lease, LeaseState.RELEASED if kept else LeaseState.ABORTED)
        return kept

    def hang_up(self, lease: int) -> None:
        """Nobody waits for the prompt any more that was to become a lease, nor for what would follow it."""
        self._waiting.pop(lease, None)
        if self.table.hang_up(lease):
            self._free(lease, LeaseState.ABORTED)

    def close(self) -> None:
        """With the node everything ends that is leased."""
        if self._timer is not None:
            self._timer.cancel()
        for course in self._courses.values():
            course.on_lease_end(LeaseState.ABORTED)
        self._courses.clear()

    def _arm(self) -> None:
        """Have one timer run while anything is leased."""
        when = self.table.next_expiry()
        if self._timer is None and when is not None:
            delay = max(0.0, when - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        for lease in self.table.expire(time.monotonic()):
            course = self._courses[lease]
            text = "lease %d of request %s expired: its peer has not given it back nor extended it"
            _log.warning(text, lease, course.request_id, extra=course.about)
            self._free(lease, LeaseState.EXPIRED)
        self._arm()

    def _free(self, lease: int, how: LeaseState) -> None:
        """The blocks of a lease that has ended are free; what the engine still computes for it is not wanted."""
        self._engine.send(FreeLease(lease))
        on_end = self._waiting.pop(lease, None)
        if on_end is not None:
            on_end()
        self._courses.pop(lease).on_lease_end(how)
        self.on_end()
