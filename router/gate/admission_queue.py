"""Slots at the nodes and the queue for them, ordered by priority, then by arrival.

Callers pass in times: seconds of one monotonic clock.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable

from pdserve.errors import Overloaded

_WINDOW = 32  # past requests in a mean duration


class MeanDuration:
    """The mean duration of past requests, in seconds, with older ones fading; 0 before the first."""

    def __init__(self) -> None:
        self.mean = 0.0
        self._count = 0

    def add(self, seconds: float) -> None:
        self._count = min(self._count + 1, _WINDOW)
        self.mean += (seconds - self.mean) / self._count


class Ticket:
    """A waiting or admitted request. ``on_decision`` receives None for a slot, or the error of a rejection."""

    __slots__ = ("admitted_at", "on_decision", "order")

    def __init__(self, order: tuple[int, int], on_decision: Callable[[Overloaded | None], None]) -> None:
        self.order = order
        self.on_decision = on_decision
        self.admitted_at: float | None = None  # None: waiting

    @property
    def admitted(self) -> bool:
        return self.admitted_at is not None

    def __lt__(self, other: Ticket) -> bool:
        return self.order < other.order


class AdmissionQueue:
    """``slots`` requests are admitted at once, ``max_waiting`` more wait."""

    def __init__(self, slots: int, max_waiting: int) -> None:
        self._slots = slots
        self._max_waiting = max_waiting
        self._waiting: list[Ticket] = []  # in order
        self._admitted: set[Ticket] = set()
        self._num_arrived = 0
        self._duration = MeanDuration()  # of admitted requests

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_admitted(self) -> int:
        return len(self._admitted)

    def expected_wait(self, num_ahead: int) -> float:
        """Expected seconds until a slot is free for a request with ``num_ahead`` requests before it."""
        return (num_ahead + 1) * self._duration.mean / self._slots

    def join(
        self, priority: int, timeout: float, now: float, on_decision: Callable[[Overloaded | None], None]
    ) -> Ticket:
        """Request a slot within ``timeout`` seconds; ``leave`` must follow.

        A waiting ticket gets one call of ``on_decision``. Raises Overloaded if the expected wait exceeds the timeout.
        A full queue rejects its last ticket, which may be this one.
        """
        self._num_arrived += 1
        ticket = Ticket((priority, self._num_arrived), on_decision)
        if len(self._admitted) < self._slots:
            self._admit(ticket, now)
            return ticket
        wait = self.expected_wait(bisect_right(self._waiting, ticket))
        if wait > timeout:
            text = f"a slot is expected in {wait:.1f} s, beyond the time limit of {timeout:.1f} s; retry later"
            raise Overloaded(text, wait - timeout)
        insort(self._waiting, ticket)
        if len(self._waiting) > self._max_waiting:
            last = self._waiting.pop()
            waiting = len(self._waiting)
            text = f"{self._slots} requests run and {waiting} wait, the limit is {self._max_waiting}; retry later"
            error = Overloaded(text, self.expected_wait(waiting))  # once all that wait now are admitted
            if last is ticket:
                raise error
            last.on_decision(error)
        return ticket

    def fail_waiting(self, error: Overloaded) -> None:
        waiting, self._waiting = self._waiting, []
        for ticket in waiting:
            ticket.on_decision(error)

    def leave(self, ticket: Ticket, now: float) -> None:
        """Release a slot or stop waiting. Does nothing for a ticket that has left or was rejected."""
        if ticket in self._admitted:
            assert ticket.admitted_at is not None
            self._admitted.discard(ticket)
            self._duration.add(now - ticket.admitted_at)
            if self._waiting:
                first = self._waiting.pop(0)
                self._admit(first, now)
                first.on_decision(None)
        elif ticket in self._waiting:
            self._waiting.remove(ticket)

    def _admit(self, ticket: Ticket, now: float) -> None:
        ticket.admitted_at = now
        self._admitted.add(ticket)
