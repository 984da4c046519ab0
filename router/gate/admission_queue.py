"""Slots at the nodes and the queue for them, ordered by priority, then fairly between clients.

Callers pass in times: seconds of one monotonic clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from pdserve.errors import Overloaded
from pdserve.fairness.fair_queue import FairQueue

_WINDOW = 32  # past requests in a mean
_QUANTUM = 64  # tokens per client and round


class RecentMean:
    """The mean of past requests, with older ones fading; 0 before the first."""

    def __init__(self) -> None:
        self.mean = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        self._count = min(self._count + 1, _WINDOW)
        self.mean += (value - self.mean) / self._count


class Ticket:
    """A waiting or admitted request. ``on_decision`` receives None for a slot, or the error of a rejection."""

    __slots__ = ("admitted_at", "client", "cost", "on_decision", "priority")

    def __init__(self, client: str, priority: int, cost: int, on_decision: Callable[[Overloaded | None], None]) -> None:
        """``cost``: prompt tokens and expected output tokens."""
        self.client = client
        self.priority = priority
        self.cost = cost
        self.on_decision = on_decision
        self.admitted_at: float | None = None  # None: waiting

    @property
    def admitted(self) -> bool:
        return self.admitted_at is not None


class AdmissionQueue:
    """``slots`` requests are admitted at once, ``max_waiting`` more wait.

    One client may fill the slots for long. So clients with few requests get an eighth more slots.
    """

    def __init__(self, slots: int, max_waiting: int) -> None:
        self._slots = slots
        self._max_waiting = max_waiting
        self._waiting = FairQueue[str, Ticket](_QUANTUM)
        self._extra_slots = slots // 8
        self._extra_per_client = max(1, self._extra_slots // 8)
        self._admitted: set[Ticket] = set()
        self._by_client = Counter[str]()  # admitted requests
        self._duration = RecentMean()  # seconds from admission to the end of a request

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_admitted(self) -> int:
        return len(self._admitted)

    def expected_wait(self, num_ahead: int) -> float:
        """Expected seconds until a slot is free for a request with ``num_ahead`` requests before it."""
        return (num_ahead + 1) * self._duration.mean / self._slots

    def join(self, ticket: Ticket, timeout: float, now: float) -> None:
        """Request a slot within ``timeout`` seconds; ``leave`` must follow.

        A waiting ticket gets one call of ``on_decision``. Raises Overloaded if the expected wait exceeds the timeout.
        A full queue rejects the last ticket of the client that has the most, which may be this one.
        """
        if not self._may_enter(ticket.client) or self._waiting.holds_before(ticket.priority):
            wait = self.expected_wait(self._waiting.ahead(ticket.client, ticket.priority))
            if wait > timeout:
                text = f"a slot is expected in {wait:.1f} s, beyond the time limit of {timeout:.1f} s; retry later"
                raise Overloaded(text, wait - timeout)
            if len(self._waiting) >= self._max_waiting:
                self._reject_for(ticket)
        self._waiting.push(ticket, ticket.client, ticket.priority)
        self._admit(now, ticket)

    def leave(self, ticket: Ticket, now: float) -> None:
        """Release a slot or stop waiting. Does nothing for a ticket that has left or was rejected."""
        if ticket in self._admitted:
            assert ticket.admitted_at is not None
            self._admitted.discard(ticket)
            self._by_client[ticket.client] -= 1
            if not self._by_client[ticket.client]:
                del self._by_client[ticket.client]
            self._duration.add(now - ticket.admitted_at)
            self._admit(now)
        elif not ticket.admitted:
            with suppress(ValueError):  # the ticket was rejected
                self._remove(ticket)
                self._admit(now)

    def charge(self, client: str, cost: int) -> None:
        """Correct the cost of a request that ran, by ``cost`` tokens."""
        self._waiting.charge(client, cost)

    def fail_waiting(self, error: Overloaded) -> None:
        for ticket in list(self._waiting):
            self._remove(ticket)
            ticket.on_decision(error)

    def _may_enter(self, client: str) -> bool:
        beyond = len(self._admitted) - self._slots
        return beyond < 0 or (beyond < self._extra_slots and self._by_client[client] < self._extra_per_client)

    def _admit(self, now: float, new: Ticket | None = None) -> None:
        """Admit waiting requests while there are slots. ``new`` is told by its return from ``join``."""
        while len(self._admitted) < self._slots + self._extra_slots:
            ticket = self._waiting.first(self._may_enter)
            if ticket is None:
                return
            self._waiting.take(ticket, ticket.client, ticket.priority, ticket.cost)
            ticket.admitted_at = now
            self._admitted.add(ticket)
            self._by_client[ticket.client] += 1
            if ticket is not new:
                ticket.on_decision(None)

    def _reject_for(self, ticket: Ticket) -> None:
        """Reject a waiting ticket so that ``ticket`` may wait. Raises Overloaded if it is the one to reject."""
        waiting = len(self._waiting)
        text = f"{self._slots} requests run and {waiting} wait, the limit is {self._max_waiting}; retry later"
        error = Overloaded(text, self.expected_wait(waiting))  # when all waiting tickets are admitted
        rejected = self._waiting.to_reject(ticket.client, ticket.priority)
        if rejected is None:
            raise error
        self._remove(rejected)
        rejected.on_decision(error)

    def _remove(self, ticket: Ticket) -> None:
        self._waiting.remove(ticket, ticket.client, ticket.priority)
