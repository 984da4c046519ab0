"""How a node ends that is told to: it takes nothing in, what it has goes on, and it ends when nobody needs it.

    ready ──SIGTERM──► draining: what is under way ends ──────────────────────► its streams end ──► exit 0
                          └─ --drain-timeout is over, SIGINT, a second signal ─► what is left is handed over ──┘

A node that drains says so to whoever has a stream to it, in order with everything else on that stream. So what was sent
before it was heard is refused with ``Draining``, and nothing is ever lost between the two: whoever has heard it sends
nothing more, and ends the stream when nothing of his is under way.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from engine.frontend.stream_writer import StreamWriter
from pdserve.errors import Draining

_log = logging.getLogger(__name__)


class ShutdownSignals:
    """``stop`` is set by SIGTERM and SIGINT, ``hurry`` by SIGINT or by a second signal of either kind."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGINT or self.stop.is_set():
            self.hurry.set()
        self.stop.set()


class Stream(Protocol):
    """A long-lived stream to this node."""

    outbox: StreamWriter[Any]  # of messages with a field ``draining``


S = TypeVar("S", bound=Stream)


class Streams(Generic[S]):
    """The open streams of a service: told once that the node drains, and waited for."""

    def __init__(self) -> None:
        self.draining = False
        self._open: list[S] = []
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[S]:
        return iter(tuple(self._open))

    @contextmanager
    def opened(self, stream: S) -> Iterator[None]:
        """While it is open."""
        self._open.append(stream)
        if self.draining:
            stream.outbox.put().draining = True
        try:
            yield
        finally:
            self._open.remove(stream)
            self.changed()

    def drain(self) -> None:
        """Have everybody know. Idempotent."""
        if not self.draining:
            self.draining = True
            for stream in self:
                stream.outbox.put().draining = True

    def changed(self) -> None:
        """Something that somebody may wait for is over."""
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns once it holds; looked at whenever ``changed`` is called."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def ended(self) -> None:
        """Returns once nobody has a stream open."""
        await self.until(lambda: not self._open)


class Drained(Protocol):
    """What has to end before a node does."""

    farewell: float
    """Seconds that others have to let go, after all is done or handed over."""

    async def finish(self) -> None:
        """Tell everybody that nothing is taken in any more; returns when nothing is under way."""

    def hand_over(self, why: Draining) -> None:
        """Give back what is under way, to go on elsewhere. Idempotent."""

    async def part(self) -> None:
        """Returns when nobody needs this node any more."""


async def drain(service: Drained, seconds: float) -> None:
    """End what is under way within so many ``seconds``, hand the rest over, and wait until others have let go."""
    try:
        async with asyncio.timeout(seconds):
            await service.finish()
    except TimeoutError:
        _log.warning("draining took longer than %g s: what still runs is handed over", seconds)
        service.hand_over(Draining(f"the node ends, and this was not over within {seconds:g} s; send it again"))
    try:
        async with asyncio.timeout(service.farewell):
            await service.part()
    except TimeoutError:
        _log.warning("others did not let go of this node within %g s", service.farewell)
