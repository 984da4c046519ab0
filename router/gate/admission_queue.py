"""Places at the nodes, and the line of those who wait for one: by priority, then by arrival.

Times are seconds of one clock, which callers pass in.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable

from pdserve.errors import Overloaded

_MEMORY = 32  # how many past stays the mean one reflects


class Stays:
    """How long a place is taken: a mean in which the past fades; 0 while nothing was measured."""

    def __init__(self) -> None:
        self.mean = 0.0
        self._count = 0

    def add(self, seconds: float) -> None:
        self._count = min(self._count + 1, _MEMORY)
        self.mean += (seconds - self.mean) / self._count


class Ticket:
    """A request in the line or at its place. ``on_turn`` hears of the place, or why there will be none."""

    __slots__ = ("admitted_at", "on_turn", "order")

    def __init__(self, order: tuple[int, int], on_turn: Callable[[Overloaded | None], None]) -> None:
        self.order = order
        self.on_turn = on_turn
        self.admitted_at: float | None = None  # None: it waits

    @property
    def admitted(self) -> bool:
        return self.admitted_at is not None

    def __lt__(self, other: Ticket) -> bool:
        return self.order < other.order


class AdmissionQueue:
    """``places`` requests have a place at once, ``max_waiting`` more wait for one."""

    def __init__(self, places: int, max_waiting: int) -> None:
        self._places = places
        self._max_waiting = max_waiting
        self._waiting: list[Ticket] = []  # in order
        self._admitted: set[Ticket] = set()
        self._arrivals = 0
        self._stays = Stays()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_admitted(self) -> int:
        return len(self._admitted)

    def expected_wait(self, ahead: int) -> float:
        """How long until a place is free for somebody with so many ahead, at the pace of late."""
        return (ahead + 1) * self._stays.mean / self._places

    def join(self, priority: int, patience: float, now: float, on_turn: Callable[[Overloaded | None], None]) -> Ticket:
        """Ask for a place that is of use only within ``patience`` seconds. ``leave`` must follow.

        Where there is none, the ticket waits, and ``on_turn`` will be called once. Raises Overloaded for a request that
        would wait too long. A full line turns its last one away, which may be this one.
        """
        self._arrivals += 1
        ticket = Ticket((priority, self._arrivals), on_turn)
        if len(self._admitted) < self._places:
            self._admit(ticket, now)
            return ticket
        wait = self.expected_wait(bisect_right(self._waiting, ticket))
        if wait > patience:
            text = f"a place is expected in {wait:.1f} s, and the time limit leaves {patience:.1f} s; come back later"
            raise Overloaded(text, wait - patience)
        insort(self._waiting, ticket)
        if len(self._waiting) > self._max_waiting:
            last = self._waiting.pop()
            error = self._full()
            if last is ticket:
                raise error
            last.on_turn(error)
        return ticket

    def dismiss(self, error: Overloaded) -> None:
        """Send away all who wait."""
        waiting, self._waiting = self._waiting, []
        for ticket in waiting:
            ticket.on_turn(error)

    def leave(self, ticket: Ticket, now: float) -> None:
        """Give up a place, or the wait for one. Does nothing for a ticket that has left or was turned away."""
        if ticket in self._admitted:
            assert ticket.admitted_at is not None
            self._admitted.discard(ticket)
            self._stays.add(now - ticket.admitted_at)
            if self._waiting:
                first = self._waiting.pop(0)
                self._admit(first, now)
                first.on_turn(None)
        elif ticket in self._waiting:
            self._waiting.remove(ticket)

    def _admit(self, ticket: Ticket, now: float) -> None:
        ticket.admitted_at = now
        self._admitted.add(ticket)

    def _full(self) -> Overloaded:
        """The line is expected to have moved up, to where it ends now, when those in it have got their places."""
        waiting = len(self._waiting)
        text = f"{self._places} requests are under way and {waiting} wait, the limit is {self._max_waiting}"
        return Overloaded(f"{text}; come back later", self.expected_wait(waiting))
