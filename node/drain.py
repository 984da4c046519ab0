"""How a node shuts down: it accepts no requests, finishes those it has, and exits when no peer needs it.

    ready ──SIGTERM──► draining: requests finish ───────────────────────────► streams end ──► exit 0
                          └─ --drain-timeout is over, SIGINT, a second signal ─► hand over ──┘

A draining node says so on every open stream, in order with the other messages. It refuses with ``Draining`` requests
that were sent before the peer knew, so no request is lost. The peer then sends nothing more, and ends the stream when
none of its requests is open.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Protocol

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


class Drainable(Protocol):
    """A service that has to end before its node exits."""

    release_timeout: float
    """Seconds for peers to close their streams after all requests are finished or handed over."""

    async def finish(self) -> None:
        """Refuse new requests; return when none is open."""

    def hand_over(self, why: Draining) -> None:
        """Return open requests to their routers or decode nodes, which continue them elsewhere. Idempotent."""

    async def wait_released(self) -> None:
        """Return when no peer needs this node any more."""

    def reopen(self) -> None:
        """Accept requests again: the node was drained to change its weights."""


class SeveralServices:
    """Services of one node, drained together: a Drainable."""

    def __init__(self, *services: Drainable) -> None:
        self._services = services
        self.release_timeout = max(service.release_timeout for service in self._services)

    async def finish(self) -> None:
        await asyncio.gather(*(service.finish() for service in self._services))

    def hand_over(self, why: Draining) -> None:
        for service in self._services:
            service.hand_over(why)

    def reopen(self) -> None:
        for service in self._services:
            service.reopen()

    async def wait_released(self) -> None:
        await asyncio.gather(*(service.wait_released() for service in self._services))


async def drain(service: Drainable, seconds: float, reason: str) -> None:
    """Finish open requests within ``seconds``, hand the rest over, and wait until peers have closed their streams."""
    try:
        async with asyncio.timeout(seconds):
            await service.finish()
    except TimeoutError:
        if seconds:
            _log.warning("draining took longer than %g s: open requests are handed over", seconds)
        service.hand_over(Draining(f"{reason}, and this request took longer than {seconds:g} s; send it again"))
    try:
        async with asyncio.timeout(service.release_timeout):
            await service.wait_released()
    except TimeoutError:
        _log.warning("peers did not close their streams to this node within %g s", service.release_timeout)
