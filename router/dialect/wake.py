"""An event for one waiting task; asyncio.Event costs a streamed token a coroutine and a list of waiters."""

from __future__ import annotations

import asyncio


class Wake:
    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        if not self._is_set:
            self._is_set = True
            if self._waiter is not None and not self._waiter.done():  # done: cancelled
                self._waiter.set_result(None)

    def clear(self) -> None:
        self._is_set = False

    def wait(self) -> asyncio.Future[None]:
        """Return a future that is done as soon as the event is set. No other task may be waiting."""
        assert self._waiter is None or self._waiter.done()
        self._waiter = asyncio.get_running_loop().create_future()
        if self._is_set:
            self._waiter.set_result(None)
        return self._waiter
