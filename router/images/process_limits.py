"""Limits of the processes that read hostile files, set from within, and what they send back."""

from __future__ import annotations

import math
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

from pdserve.host.process import end_with_parent
from router.freed_memory import map_large_blocks

_NICE = 5  # the router's loop and its streams go first


def begin() -> None:
    """End this process with the router, and before it where memory is short."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the router, which ends this process
    os.nice(_NICE)
    with suppress(OSError):  # out of memory, the kernel ends this process before the router
        Path("/proc/self/oom_score_adj").write_text("1000")
    map_large_blocks()


def limit_memory(max_memory: int) -> None:
    """Limit the address space of this process to so many bytes."""
    resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))


def limit_time(seconds: int) -> None:
    """Have the kernel end this process after so much more CPU time. A busy machine changes nothing."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + seconds, most))


def replace_content(scratch: int, data: bytes | bytearray) -> None:
    """Replace the content of the scratch file."""
    os.ftruncate(scratch, 0)
    os.lseek(scratch, 0, os.SEEK_SET)
    view = memoryview(data)
    while view:
        view = view[os.write(scratch, view) :]
