"""The work of an event loop, counted: lines of Python that run from one return to the loop to the next.

A count depends on neither the machine nor its load. Calls of C count as the line that makes them.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, TypeVar

_HANDLE: CodeType = asyncio.Handle._run.__code__  # runs one callback, or one step of a task

Result = TypeVar("Result")
Trace = Callable[[FrameType, str, Any], Any]


class Stalled(BaseException):
    """Ends work beyond a limit. No handler of errors takes it for one of its own."""


class LoopWork:
    """Counts the lines of this thread. ``longest``: of one step; ``where``: the stack at which it exceeded ``most``."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.longest = 0
        self.where = ""
        self._lines = 0

    @contextmanager
    def counted(self) -> Iterator[LoopWork]:
        before = sys.gettrace()
        self._lines = 0
        sys.settrace(self._on_call)
        try:
            yield self
        finally:
            sys.settrace(before)
            self.longest = max(self.longest, self._lines)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Trace | None:
        if frame.f_code is _HANDLE:
            self.longest = max(self.longest, self._lines)
            self._lines = 0
            return None
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Trace:
        if event == "line":
            self._lines += 1
            if self._lines > self.most:
                self.longest = self._lines
                self.where = "".join(traceback.format_stack(frame, 4))
                raise Stalled(self.where)
        return self._on_line


def count_lines(work: Callable[[], Result], most: int = 10_000_000) -> tuple[Result, int]:
    """Return the result of ``work``, and the lines that it took. Raises Stalled beyond ``most``."""
    with LoopWork(most).counted() as counter:
        result = work()
    return result, counter.longest
