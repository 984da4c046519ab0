"""Virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Events:
    """The time, in seconds, and what happens later."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()

    def at(self, when: float, what: Callable[[], object]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), what))

    def after(self, seconds: float, what: Callable[[], object]) -> None:
        self.at(self.now + seconds, what)

    def next(self) -> None:
        self.now, _, what = heapq.heappop(self._heap)
        what()
