"""Prompts on their way through P's engine, and the leases they become, part by part."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from engine.link import EngineLink, Event, error_of
from engine.messages import Cancel, FreeLease, Leased, Mode, Output, Refused, Submit
from pdserve.errors import DeadlineExceeded, PdserveError, PeerError
from pdserve.records import Sample, SamplingParams
from prefill_node.course import Course
from prefill_node.leases import LeaseState, LeaseTable

_log = logging.getLogger(__name__)


class PendingPrefill:
    """One prompt of ``num_tokens``: its blocks part by part, and with the last one the first token of each choice.

    ``on_part`` is told of each part, in the callback in which the engine has leased it; the lease begins with the first
    one, however slowly the peer takes them in. Where there will be no last one, ``on_failed`` is told why: what the
    engine refused the prompt with, DeadlineExceeded after ``timeout`` seconds (0: none), or PeerError when the lease
    has ended. After either, and after ``hang_up``, nothing more is told.
    """

    def __init__(
        self,
        link: EngineLink,
        leases: Leases,
        num_tokens: int,
        timeout: float,
        on_part: Callable[[PendingPrefill, Leased], None],
        on_failed: Callable[[PdserveError], None],
        course: Course,
    ) -> None:
        self._link = link
        self._leases = leases
        self.rid = link.open(self._on_event)
        self.num_tokens = num_tokens
        self.samples: list[Sample] = []  # by choice
        self.cached_tokens = 0
        self.queued = 0.0  # seconds, before its first step
        self._on_part = on_part
        self._on_failed = on_failed
        self._course = course
        self._over = False
        late = DeadlineExceeded(
            f"the prompt was not computed within the {timeout:.3g} s that were left of its request's"
        )
        self._timer = asyncio.get_running_loop().call_later(timeout, self._fail, late) if timeout else None
        leases.accept(self.rid, self._on_lease_end, course)

    def submit(
        self, token_ids: bytes, sampling: SamplingParams, cache_salt: str, priority: int, skip_tokens: int
    ) -> None:
        self._link.send(Submit(self.rid, token_ids, sampling, Mode.LEASE, cache_salt, priority, skip_tokens))

    def hang_up(self) -> None:
        """Stop it, wherever it is: nobody waits for it, or it was refused. What was announced stays leased."""
        self._stop()
        self._link.send(Cancel(self.rid))
        self._leases.hang_up(self.rid)

    def _on_event(self, event: Event) -> None:
        match event:
            case Output():
                if event.sample is not None:
                    self.samples.append(event.sample)
                self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
                self.queued = max(self.queued, event.queued)
            case Leased():
                complete = event.num_tokens == self.num_tokens
                if self._leases.announce(self.rid, complete):
                    self._course.on_part(event.num_tokens, len(event.block_ids))
                    if complete:
                        self._stop()
                        self._course.on_computed(self.queued, self.cached_tokens)
                    self._on_part(self, event)
            case Refused():
                self._fail(error_of(event))

    def _on_lease_end(self) -> None:
        """The lease has ended before all blocks were announced: nobody needs the rest."""
        if not self._over:
            self._stop()
            error = PeerError(f"lease {self.rid} ended before all of its blocks were announced")
            self._course.on_failed(error)
            self._on_failed(error)

    def _fail(self, error: PdserveError) -> None:
        self._course.on_failed(error)
        self.hang_up()
        self._on_failed(error)

    def _stop(self) -> None:
        self._over = True
        self._link.close(self.rid)
        if self._timer is not None:
            self._timer.cancel()


class Leases:
    """The lease table, its timer and the engine that holds the blocks, kept in step.

    ``on_end`` is called when a lease has ended.
    """

    def __init__(self, link: EngineLink, table: LeaseTable) -> None:
        self._link = link
        self.table = table
        self.on_end: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None
        self._wanted: dict[int, Callable[[], None]] = {}  # by lease, until all of its blocks have been announced
        self._courses: dict[int, Course] = {}  # by lease

    @property
    def idle(self) -> bool:
        """Nothing is leased."""
        return not len(self.table)

    def accept(self, lease: int, on_end: Callable[[], None], course: Course) -> None:
        """A prompt is to become a lease. ``on_end`` is called when that ends before all blocks were announced."""
        self.table.accept(lease)
        self._wanted[lease] = on_end
        self._courses[lease] = course

    def announce(self, lease: int, complete: bool) -> bool:
        """A peer is to be told of more blocks. False when the lease has ended: it must not be."""
        stands = self.table.announce(lease, complete, time.monotonic())
        if stands and complete:
            del self._wanted[lease]
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
        """Nobody waits for the prompt any more that was to become a lease."""
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
        on_end = self._wanted.pop(lease, None)
        if on_end is not None:
            self._link.send(Cancel(lease))
            on_end()
        self._courses.pop(lease).on_lease_end(how)
        self._link.send(FreeLease(lease))
        self.on_end()
