"""Queue of sequences that wait for blocks: by the priority of their requests, first in first out within a priority."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from itertools import chain

from engine.request import Sequence


class WaitingQueue:
    """A deque for each priority; the head is the first sequence of the lowest priority value."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[Sequence]] = {}  # by priority; none is empty
        self._priorities: list[int] = []  # of the queues, sorted

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._queues[priority] for priority in self._priorities)

    @property
    def head(self) -> Sequence | None:
        return self._queues[self._priorities[0]][0] if self._priorities else None

    def append(self, sequence: Sequence) -> None:
        """Add at the end of its priority."""
        self._queue(sequence).append(sequence)

    def appendleft(self, sequence: Sequence) -> None:
        """Add at the head of its priority."""
        self._queue(sequence).appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError if the sequence is not queued."""
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
