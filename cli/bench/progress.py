"""The progress of ``pdserve bench`` on stderr: a bar on a terminal, lines in a pipe."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rich.console import Console
from rich.progress import Progress

_SECONDS = 10.0  # between lines


@asynccontextmanager
async def progress(total: int, requests: str) -> AsyncIterator[Callable[[], None]]:
    """Yield a function to call at the end of each request. ``requests`` names them: requests of the warm-up."""
    console = Console(stderr=True)
    if console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(requests, total=total)
            yield lambda: bar.advance(task)
        return
    done = 0
    began = time.perf_counter()

    def advance() -> None:
        nonlocal done
        done += 1

    def say() -> None:
        seconds = time.perf_counter() - began
        print(f"pdserve bench: {done:,} of {total:,} {requests} after {seconds:.0f} s", file=sys.stderr, flush=True)

    async def repeat() -> None:
        while True:
            say()
            await asyncio.sleep(_SECONDS)

    lines = asyncio.create_task(repeat())
    try:
        yield advance
        say()
    finally:
        lines.cancel()
