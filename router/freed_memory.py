"""Returns freed memory to the system. The C library keeps it, so one burst of large requests would last for ever."""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path

_INTERVAL = 2.0  # seconds between two trims; doubled while they do not help
_MAX_INTERVAL = 30.0  # seconds
_GROWTH = 64 << 20  # bytes of resident memory above the smallest value seen
_M_MMAP_THRESHOLD = -3  # glibc's number of the parameter
_MAPPED_BYTES = 256 * 1024  # larger blocks return when they are freed; by default, this grows up to 32 MiB
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_library = ctypes.CDLL(None)
_is_glibc = hasattr(_library, "malloc_trim")


def map_large_blocks() -> None:
    """Make the C library return each large block when it is freed."""
    if _is_glibc:
        _library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def trim() -> None:
    """Return free memory to the system. Takes tens of milliseconds after a burst, without the GIL."""
    if _is_glibc:
        _library.malloc_trim(0)


class MemoryTrimmer:
    """Trims a process that has grown."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        map_large_blocks()
        self._task = asyncio.create_task(_keep_trimmed(), name="memory")

    def close(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()


async def _keep_trimmed() -> None:
    smallest = _resident_bytes()
    interval = _INTERVAL
    while True:
        await asyncio.sleep(interval)
        before = _resident_bytes()
        smallest = min(smallest, before)
        if before <= smallest + _GROWTH:
            interval = _INTERVAL
            continue
        await asyncio.to_thread(trim)
        helped = before - _resident_bytes() > _GROWTH // 4
        interval = _INTERVAL if helped else min(2 * interval, _MAX_INTERVAL)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
