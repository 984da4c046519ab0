"""IdleTimer: finds streams that have sent nothing for a while. It costs a streamed token one read of the clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class IdleTimer:
    """Calls ``on_idle`` while ``due``: ``seconds`` have passed since ``sent``. 0: never. Use it as a context."""

    def __init__(self, seconds: float, on_idle: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._on_idle = on_idle
        self._due_at = 0.0  # time of the event loop
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> IdleTimer:
        self.sent()
        if self._seconds > 0:
            self._timer = self._loop.call_at(self._due_at, self._look)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @property
    def due(self) -> bool:
        return self._seconds > 0 and self._loop.time() >= self._due_at

    def sent(self) -> None:
        """Note that the stream has sent something."""
        self._due_at = self._loop.time() + self._seconds

    def _look(self) -> None:
        if self.due:
            self._on_idle()
            self._timer = self._loop.call_later(self._seconds, self._look)
        else:
            self._timer = self._loop.call_at(self._due_at, self._look)
