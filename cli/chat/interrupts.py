"""Ctrl-C in a chat: SIGINT cancels a request, or interrupts the reading of a message.

Python's own handler raises KeyboardInterrupt wherever the main thread is, which can break the console or a connection.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Handles SIGINT. While a message is read, it raises KeyboardInterrupt. While a task runs, it cancels the task.

    A SIGINT between the two cancels the next task when it starts.
    """

    def __init__(self) -> None:
        self._raises = self._is_pending = False
        self._cancel: Callable[[], object] | None = None

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle SIGINT until the context ends."""
        before = signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def read(self, read: Callable[[], str]) -> str:
        """Return the result of ``read``. Raises KeyboardInterrupt."""
        self._is_pending = False
        self._raises = True
        try:
            return read()
        finally:
            self._raises = False

    @contextmanager
    def cancelling(self, task: asyncio.Task[object]) -> Iterator[None]:
        """Cancel a task at each SIGINT. The loop must run in the main thread."""
        loop = task.get_loop()
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        if self._is_pending:
            self._is_pending = False
            task.cancel()
        try:
            yield
        finally:
            self._cancel = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._raises:
            self._raises = False
            raise KeyboardInterrupt
        if self._cancel is None:
            self._is_pending = True
        else:
            self._cancel()
