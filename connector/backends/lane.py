"""A thread that executes orders one after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

OrderT = TypeVar("OrderT")


class Lane(Generic[OrderT]):
    """The thread calls ``begin`` once, then ``execute`` for each order."""

    def __init__(self, name: str, begin: Callable[[], None], execute: Callable[[OrderT], None]) -> None:
        self._begin = begin
        self._execute = execute
        self._orders: queue.SimpleQueue[OrderT | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, order: OrderT) -> None:
        self._orders.put(order)

    def close(self, seconds: float | None = None) -> None:
        """Wait up to ``seconds`` for the order that is executed; forget the others."""
        while not self._orders.empty():
            self._orders.get()
        self._orders.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        self._begin()
        while (order := self._orders.get()) is not None:
            self._execute(order)
