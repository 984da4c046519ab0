"""Sequences that wait for blocks and a seat: by the priority of their requests, in each priority as they were put."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from itertools import chain

from engine.request import Sequence


class WaitingQueue:
    """A deque for each priority; the first of the lowest one is the head. Where all are equal it is a plain deque."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[Sequence]] = {}  # none is empty
        self._priorities: list[int] = []  # those of the queues, in order

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """From the head on."""
        return chain.from_iterable(self._queues[priority] for priority in self._priorities)

    @property
    def head(self) -> Sequence | None:
        return self._queues[self._priorities[0]][0] if self._priorities else None

    def append(self, sequence: Sequence) -> None:
        """Behind all that are as urgent."""
        self._queue(sequence).append(sequence)

    def appendleft(self, sequence: Sequence) -> None:
        """Ahead of all that are as urgent."""
        self._queue(sequence).appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError when it does not wait."""
        priority = sequence.request.priority
        queue = self._queues.get(priority, deque())
        queue.remove(sequence)
        if not queue:
            del self._queues[priority]
            self._priorities.remove(priority)

    def _queue(self, sequence: Sequence) -> deque[Sequence]:
        priority = sequence.request.priority
        if priority not in self._queues:
            self._queues[priority] = deque()
            insort(self._priorities, priority)
        return self._queues[priority]
