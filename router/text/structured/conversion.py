"""Converts the structure of a request to grammars: at first on the event loop, what takes longer on a thread.

request ──► Conversion.run(convert) ──► convert(budget) on the event loop, up to INLINE_WORK steps for the request
                                   └──► then again on the thread, up to MAX_WORK steps for the request; beyond: 400
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from router.text.fair_slots import FairSlots
from router.text.structured.work_budget import Budget, WorkExceeded

INLINE_WORK = 3000  # steps, about 3 ms

Result = TypeVar("Result")


class Conversions:
    """The thread, which clients share fairly."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="structure")
        self._slots = FairSlots(1)

    def begin(self) -> Conversion:
        """Begin the conversions of a request."""
        return Conversion(self._thread, self._slots)

    def close(self) -> None:
        """Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class Conversion:
    """The conversions of one request, one after the other, within one budget."""

    def __init__(self, thread: ThreadPoolExecutor, slots: FairSlots) -> None:
        self._thread = thread
        self._slots = slots
        self._inline = Budget(INLINE_WORK)
        self._budget = Budget()

    async def run(self, convert: Callable[[Budget], Result]) -> Result:
        """Return what ``convert`` returns; it may be called twice. Raises its errors, and WorkExceeded."""
        with suppress(WorkExceeded):
            return convert(self._inline)
        async with self._slots.slot():
            return await asyncio.get_running_loop().run_in_executor(self._thread, convert, self._budget)
