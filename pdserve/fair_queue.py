"""Order of waiting requests: by level, then fair between clients, then first in, first out.

Clients of a level take turns: surplus round robin, a deficit round robin that charges a request after it was served.
Each round grants a client ``quantum`` and serves one of its requests, unless earlier ones have overdrawn its balance.
So all clients get the same cost, and a request waits at most for the rounds of its own client's overdraft and one more.
A new client joins at the end of the round, so that ever new ones do not starve those before them.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from typing import Any, Generic, TypeVar

T = TypeVar("T")
ClientT = TypeVar("ClientT", bound=Hashable)
_MAX_ACCOUNTS = 4096  # clients whose balances are kept; those who owe most are the last to be forgotten


def _any(client: object) -> bool:
    return True


class _Level(Generic[ClientT, T]):
    def __init__(self) -> None:
        self.requests: dict[ClientT, deque[T]] = {}  # none is empty; in order of joining
        self.this_round: deque[ClientT] = deque()  # the first one has its turn
        self.next_round: deque[ClientT] = deque()


class FairQueue(Generic[ClientT, T]):
    """Levels are comparable values; the lowest is served first. Balances are shared by all levels."""

    def __init__(self, quantum: int) -> None:
        """``quantum``: cost that each client is granted per round, and the least cost of a request."""
        self._quantum = quantum
        self._granted = 0  # cost per client since the start
        self._spent: dict[ClientT, int] = {}  # likewise; a client that is absent has a balance of ``quantum``
        self._levels: dict[Any, _Level[ClientT, T]] = {}  # none is empty
        self._order: list[Any] = []  # keys of the levels, sorted
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        """Yield all requests: by level, then by client."""
        return chain.from_iterable(chain.from_iterable(self._levels[key].requests.values()) for key in self._order)

    @property
    def head(self) -> T | None:
        """The request to serve next."""
        return self.first(_any)

    def first(self, eligible: Callable[[ClientT], bool]) -> T | None:
        """The request to serve next of eligible clients; None if none of them waits at the lowest level."""
        if not self._order:
            return None
        level = self._levels[self._order[0]]
        client = self._turn(level, eligible)
        return None if client is None else level.requests[client][0]

    def push(self, request: T, client: ClientT, key: Any, *, first: bool = False) -> None:
        """Add at the end of the client's requests of a level, or before them."""
        if key not in self._levels:
            self._levels[key] = _Level()
            insort(self._order, key)
        level = self._levels[key]
        if client not in level.requests:
            level.requests[client] = deque()
            level.next_round.append(client)
        waiting = level.requests[client]
        waiting.appendleft(request) if first else waiting.append(request)
        self._length += 1

    def take(self, request: T, client: ClientT, key: Any, cost: int) -> None:
        """Remove a request that is served, and charge its client. Raises ValueError if the request is not queued."""
        self.remove(request, client, key)
        self.charge(client, max(cost, self._quantum))

    def remove(self, request: T, client: ClientT, key: Any) -> None:
        """Remove without charge. Raises ValueError if the request is not queued."""
        level = self._levels.get(key)
        if level is None or client not in level.requests:
            raise ValueError(f"{request!r} is not queued")
        waiting = level.requests[client]
        waiting.remove(request)
        self._length -= 1
        if not waiting:
            del level.requests[client]
            (level.this_round if client in level.this_round else level.next_round).remove(client)
        if not level.requests:
            del self._levels[key]
            self._order.remove(key)

    def charge(self, client: ClientT, cost: int) -> None:
        """Count more cost, or less if it is negative. A client saves no more than a round."""
        self._spent[client] = self._granted - self._balance(client) + cost
        if len(self._spent) > _MAX_ACCOUNTS:
            by_spent = sorted(self._spent.items(), key=lambda account: account[1])
            self._spent = dict(by_spent[_MAX_ACCOUNTS // 2 :])

    def pass_turn(self) -> None:
        """Let the next client of the head's level have its turn."""
        level = self._levels[self._order[0]]
        self._turn(level, _any)
        level.next_round.append(level.this_round.popleft())

    def holds_before(self, key: Any) -> bool:
        """Whether a request of a lower level waits."""
        return bool(self._order) and bool(self._order[0] < key)

    def ahead(self, client: ClientT, key: Any) -> int:
        """Estimate how many requests are served before a new one; other clients get as many as this one."""
        ahead = 0
        for other in self._order:
            if other < key:
                ahead += sum(map(len, self._levels[other].requests.values()))
            elif other == key:
                requests = self._levels[other].requests
                own = len(requests.get(client, ()))
                ahead += own + sum(min(len(each), own + 1) for name, each in requests.items() if name != client)
        return ahead

    def to_reject(self, client: ClientT, key: Any) -> T | None:
        """Return the request to reject from a full queue so that a new one may wait; None: reject the new one.

        It is of the worst level. There it is the last one of the client with the most requests, the new one included.
        """
        if not self._order or self._order[-1] < key:
            return None
        worst = self._levels[self._order[-1]].requests
        largest = max(reversed(worst.values()), key=len)
        if self._order[-1] == key and len(largest) <= len(worst.get(client, ())) + 1:
            return None
        return largest[-1]

    def _balance(self, client: ClientT) -> int:
        spent = self._spent.get(client)
        return self._quantum if spent is None else min(self._granted - spent, self._quantum)

    def _turn(self, level: _Level[ClientT, T], eligible: Callable[[ClientT], bool]) -> ClientT | None:
        """Return the eligible client whose turn it is. If all of them are overdrawn, rounds pass until one is not."""
        while True:
            while level.this_round:
                client = level.this_round[0]
                if self._balance(client) > 0 and eligible(client):
                    return client
                level.next_round.append(level.this_round.popleft())
            level.this_round, level.next_round = level.next_round, level.this_round
            largest = max(map(self._balance, filter(eligible, level.this_round)), default=None)
            if largest is None:
                return None
            self._granted += self._quantum * max(1, 1 + -largest // self._quantum)
