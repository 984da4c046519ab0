"""Returns freed memory to the system. The C library keeps it, so one burst of large requests would last for ever."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

_INTERVAL, _MAX_INTERVAL = 2.0, 30.0  # seconds between two trims; doubled while they do not help
_GROWTH = 64 << 20  # bytes of resident memory above the smallest value seen
_M_MMAP_THRESHOLD = -3  # glibc's name of the parameter
_MAPPED_BYTES = 256 * 1024  # larger blocks go back to the system when they are freed; the default grows up to 32 MiB
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryTrimmer:
    """Trims the heaps of a process that has grown."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start, if the C library is glibc."""
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):
            library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
            self._task = asyncio.create_task(_keep_trimmed(library.malloc_trim), name="memory")

    def close(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()


async def _keep_trimmed(trim: Callable[[int], int]) -> None:
    smallest, interval = _resident_bytes(), _INTERVAL
    while True:
        await asyncio.sleep(interval)
        before = _resident_bytes()
        smallest = min(smallest, before)
        if before <= smallest + _GROWTH:
            interval = _INTERVAL
            continue
        await asyncio.to_thread(trim, 0)  # tens of milliseconds without the GIL
        helped = before - _resident_bytes() > _GROWTH // 4
        interval = _INTERVAL if helped else min(2 * interval, _MAX_INTERVAL)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
