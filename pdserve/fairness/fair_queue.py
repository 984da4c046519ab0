"""Order of waiting requests: by priority, then fair between clients, then first in, first out.

Clients of a priority take turns: surplus round robin, a deficit round robin that charges a request after it was served.
Each round grants a client ``quantum`` and serves one of its requests, unless earlier ones have overdrawn its balance.
So all clients get the same cost, and a request waits at most for the rounds of its own client's overdraft and one more.
A new client joins at the end of the round, so that a flow of new clients does not starve waiting ones.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
ClientT = TypeVar("ClientT", bound=Hashable)
_MAX_ACCOUNTS = 4096  # clients whose balances are kept; the smallest debts are forgotten first


def _any(client: object) -> bool:
    return True


class _Level(Generic[ClientT, T]):
    def __init__(self) -> None:
        self.requests: dict[ClientT, deque[T]] = {}  # none is empty; in order of joining
        self.this_round: deque[ClientT] = deque()  # the first one has its turn
        self.next_round: deque[ClientT] = deque()


class _Turn(NamedTuple, Generic[ClientT, T]):
    level: _Level[ClientT, T]
    client: ClientT
    rounds: int  # rounds that pass before

    @property
    def requests(self) -> deque[T]:
        return self.level.requests[self.client]


class FairQueue(Generic[ClientT, T]):
    """Lower priorities are served first. A client has one balance for all of them."""

    def __init__(self, quantum: int) -> None:
        """``quantum``: cost that each client is granted per round, and the least cost of a request."""
        self._quantum = quantum
        self._granted = 0  # cost per client since the start
        self._spent: dict[ClientT, int] = {}  # cost since the start; an absent client has a balance of ``quantum``
        self._levels: dict[int, _Level[ClientT, T]] = {}  # none is empty
        self._order: list[int] = []  # priorities of the levels, sorted
        self._length = 0
        self._next: _Turn[ClientT, T] | None = None  # None: to be found

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        """Yield all requests: by priority, then by client."""
        return chain.from_iterable(
            chain.from_iterable(self._levels[priority].requests.values()) for priority in self._order
        )

    @property
    def head(self) -> T | None:
        """The request to serve next."""
        return self.first(_any) if self._next is None else self._next.requests[0]

    def first(self, eligible: Callable[[ClientT], bool]) -> T | None:
        """The request to serve next of eligible clients; None if none of them waits at the best priority."""
        if not self._order:
            return None
        self._next = self._find_turn(self._levels[self._order[0]], eligible)
        return None if self._next is None else self._next.requests[0]

    def push(self, request: T, client: ClientT, priority: int, *, first: bool = False) -> None:
        """Add at the end of the client's requests of a priority, or before them."""
        if priority not in self._levels:
            self._levels[priority] = _Level()
            insort(self._order, priority)
        level = self._levels[priority]
        if client not in level.requests:
            level.requests[client] = deque()
            level.next_round.append(client)
        waiting = level.requests[client]
        waiting.appendleft(request) if first else waiting.append(request)
        self._length += 1
        self._next = None

    def advance(self, request: T, client: ClientT, priority: int, stays: Callable[[T], bool]) -> None:
        """Put a queued request before the others of its client and priority, but behind leading ones that stay.

        The turns of clients stay. Raises ValueError if the request is not queued.
        """
        waiting = self._levels[priority].requests[client]
        waiting.remove(request)
        first = next((place for place, other in enumerate(waiting) if not stays(other)), len(waiting))
        waiting.insert(first, request)
        self._next = None

    def take(self, request: T, client: ClientT, priority: int, cost: int) -> None:
        """Remove a request that is served, and charge its client. Raises ValueError if the request is not queued."""
        if self._next is not None and self._next.client == client:
            self._begin(self._next)
        self.remove(request, client, priority)
        self.charge(client, max(cost, self._quantum))

    def remove(self, request: T, client: ClientT, priority: int) -> None:
        """Remove without charge. Raises ValueError if the request is not queued."""
        level = self._levels.get(priority)
        if level is None or client not in level.requests:
            raise ValueError(f"{request!r} is not queued")
        waiting = level.requests[client]
        waiting.remove(request)
        self._length -= 1
        self._next = None
        if not waiting:
            del level.requests[client]
            (level.this_round if client in level.this_round else level.next_round).remove(client)
        if not level.requests:
            del self._levels[priority]
            self._order.remove(priority)

    def charge(self, client: ClientT, cost: int) -> None:
        """Count more cost, or less if it is negative. A client saves no more than a round."""
        self._spent[client] = self._granted - self._balance(client) + cost
        self._next = None
        if len(self._spent) > _MAX_ACCOUNTS:
            by_spent = sorted(self._spent.items(), key=lambda account: account[1])
            self._spent = dict(by_spent[_MAX_ACCOUNTS // 2 :])

    def pass_turn(self) -> None:
        """Let the next client of the head's priority have its turn."""
        if self.head is not None:
            assert self._next is not None
            level = self._begin(self._next)
            level.next_round.append(level.this_round.popleft())

    def holds_before(self, priority: int) -> bool:
        """Whether a request of a better priority waits."""
        return bool(self._order) and self._order[0] < priority

    def ahead(self, client: ClientT, priority: int) -> int:
        """Estimate how many requests are served before a new one; other clients get as many as this one."""
        ahead = 0
        for other in self._order:
            if other < priority:
                ahead += sum(map(len, self._levels[other].requests.values()))
            elif other == priority:
                requests = self._levels[other].requests
                own = len(requests.get(client, ()))
                ahead += own + sum(min(len(queue), own + 1) for name, queue in requests.items() if name != client)
        return ahead

    def to_reject(self, client: ClientT, priority: int) -> T | None:
        """Return the request to reject from a full queue so that a new one may wait; None: reject the new one.

        It is of the worst priority: the last one of the client with the most requests, the new one included.
        """
        if not self._order or self._order[-1] < priority:
            return None
        worst = self._levels[self._order[-1]].requests
        largest = max(reversed(worst.values()), key=len)
        if self._order[-1] == priority and len(largest) <= len(worst.get(client, ())) + 1:
            return None
        return largest[-1]

    def _balance(self, client: ClientT) -> int:
        spent = self._spent.get(client)
        return self._quantum if spent is None else min(self._granted - spent, self._quantum)

    def _find_turn(self, level: _Level[ClientT, T], eligible: Callable[[ClientT], bool]) -> _Turn[ClientT, T] | None:
        """Return the next turn of an eligible client. If all of them are overdrawn, rounds pass until one is not."""
        for client in filter(eligible, level.this_round):
            if self._balance(client) > 0:
                return _Turn(level, client, 0)
        turns = (
            (self._rounds(client), client) for client in filter(eligible, chain(level.next_round, level.this_round))
        )
        first = min(turns, key=itemgetter(0), default=None)  # the first of equals
        return None if first is None else _Turn(level, first[1], first[0])

    def _rounds(self, client: ClientT) -> int:
        """Count the rounds, at least one, until the client has a positive balance."""
        return max(1, 1 + -self._balance(client) // self._quantum)

    def _begin(self, turn: _Turn[ClientT, T]) -> _Level[ClientT, T]:
        """Let the rounds of a turn pass, and move its client to the head of the round."""
        level = turn.level
        if turn.rounds:
            level.next_round.extend(level.this_round)
            level.this_round = level.next_round
            level.next_round = deque()
            self._granted += turn.rounds * self._quantum
        while level.this_round[0] != turn.client:
            level.next_round.append(level.this_round.popleft())
        self._next = None
        return level
