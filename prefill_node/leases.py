"""P's promises to keep blocks. Pure: the clock is passed in, nothing is freed here, only decided.

    granted ──release──► released       the peer has read them, or does not want them any more
       │ └────abort────► aborted        the peer went away before it was told of the last blocks
       └──start─expire─► expired        lease and guard have passed on our monotonic clock

A lease grows: it is granted with the first blocks of a prompt that are announced, and its time starts with the last.
Until then it stands as long as the peer's call does; the request that computes the rest holds the blocks anyhow. Who
may free what, and when:

    P's engine   leases blocks, more blocks, … the last ───────────────────────► frees them, once FreeLease says so
    P's front      └ grant                      └ start ──── lease_ms ────┬── guard ──┐ expire → FreeLease
    D                └ told ─ reads, …               └ told ─ gives up ───┘ (a margin before the end, by its own clock)

D's clock starts when it hears of the last blocks, which is after ours has started; the guard is for that delay. Should
it be longer yet, D reads blocks that are in use again, and learns so: ``release`` then answers that the lease has not
stood.
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
        self._standing: set[int] = set()  # with or without a time running
        self._finished: OrderedDict[int, LeaseState] = OrderedDict()  # oldest first
        self._heap: list[tuple[float, int]] = []  # (when, lease), with leases that have ended meanwhile
        self.counts = dict.fromkeys(LeaseState, 0)

    def grant(self, lease: int) -> None:
        """Promise blocks; the lease's number must be new."""
        assert lease not in self._standing, lease
        self._standing.add(lease)
        self.counts[LeaseState.GRANTED] += 1

    def start(self, lease: int, now: float) -> None:
        """All blocks are there: the time of the lease runs from now on, unless it has ended already."""
        if lease in self._standing:
            heapq.heappush(self._heap, (now + self.seconds + self.guard, lease))

    def release(self, lease: int) -> tuple[bool, bool]:
        """End a lease at the peer's wish. Returns (it stood until its release, its blocks are to be freed now).

        A repeated release says again what the first one said; an unknown lease has not stood.
        """
        if self._end(lease, LeaseState.RELEASED):
            return True, True
        return self._finished.get(lease) is LeaseState.RELEASED, False

    def abort(self, lease: int) -> bool:
        """End a lease whose peer has not heard of all its blocks. Returns whether its blocks are to be freed now."""
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
        """When ``expire`` will next have something to do; None while no lease's time runs."""
        while self._heap and self._heap[0][1] not in self._standing:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def __len__(self) -> int:
        return len(self._standing)

    def __contains__(self, lease: int) -> bool:
        return lease in self._standing

    def _end(self, lease: int, state: LeaseState) -> bool:
        if lease not in self._standing:
            return False
        self._standing.remove(lease)
        self.counts[state] += 1
        self._finished[lease] = state
        if len(self._finished) > self._remember:
            self._finished.popitem(last=False)
        return True
