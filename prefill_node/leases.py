"""P's promises to keep blocks. Pure: the clock is passed in, nothing is freed here, only decided.

    granted ──release──► released       the peer has read them, or does not want them any more
       │ └────abort────► aborted        the peer went away before it could be told of the lease
       └──────expire───► expired        lease and guard have passed on our monotonic clock

Who may free what, and when:

    P's engine   grants blocks ─────────────────────────────────────────► frees them, once FreeLease says so
    P's front            └ lease starts ──── lease_ms ────┬── guard ──┐ expire → FreeLease
    D                         └ told ─ reads ─ gives up ──┘ (a margin before the end, by its own clock)

D's clock starts when it hears of the lease, which is after ours has started; the guard is for that delay. Should it be
longer yet, D reads blocks that are in use again, and learns so: ``release`` then answers that the lease has not stood.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from enum import StrEnum


class LeaseState(StrEnum):
    GRANTED = "granted"
    RELEASED = "released"
    EXPIRED = "expired"
    ABORTED = "aborted"


class LeaseTable:
    """All leases of one node in one epoch. Times are seconds of one monotonic clock."""

    def __init__(self, seconds: float, guard: float, remember: int = 65_536) -> None:
        """``remember`` bounds how many finished leases are kept, to answer a repeated release as the first one."""
        self.seconds = seconds
        self.guard = guard
        self._remember = remember
        self._standing: dict[int, float] = {}  # lease → when it may be freed
        self._finished: OrderedDict[int, LeaseState] = OrderedDict()  # oldest first
        self._heap: list[tuple[float, int]] = []  # (when, lease), with leases that have ended meanwhile
        self.counts = dict.fromkeys(LeaseState, 0)

    def grant(self, lease: int, now: float) -> None:
        """Start a lease; its number must be new."""
        assert lease not in self._standing, lease
        until = now + self.seconds + self.guard
        self._standing[lease] = until
        heapq.heappush(self._heap, (until, lease))
        self.counts[LeaseState.GRANTED] += 1

    def release(self, lease: int) -> tuple[bool, bool]:
        """End a lease at the peer's wish. Returns (it stood until its release, its blocks are to be freed now).

        A repeated release says again what the first one said; an unknown lease has not stood.
        """
        if self._end(lease, LeaseState.RELEASED):
            return True, True
        return self._finished.get(lease) is LeaseState.RELEASED, False

    def abort(self, lease: int) -> bool:
        """End a lease whose peer never heard of it. Returns whether its blocks are to be freed now."""
        return self._end(lease, LeaseState.ABORTED)

    def expire(self, now: float) -> list[int]:
        """End all leases whose time and guard have passed by ``now``; their blocks are to be freed."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            _, lease = heapq.heappop(self._heap)
            if self._end(lease, LeaseState.EXPIRED):
                expired.append(lease)
        return expired

    def next_expiry(self) -> float | None:
        """When ``expire`` will next have something to do; None while nothing is leased."""
        while self._heap and self._heap[0][1] not in self._standing:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def __len__(self) -> int:
        return len(self._standing)

    def __contains__(self, lease: int) -> bool:
        return lease in self._standing

    def _end(self, lease: int, state: LeaseState) -> bool:
        if self._standing.pop(lease, None) is None:
            return False
        self.counts[state] += 1
        self._finished[lease] = state
        if len(self._finished) > self._remember:
            self._finished.popitem(last=False)
        return True
