"""A rolling restart, as a cluster does it: one process after the other is told to end, and started again.

    for each: SIGTERM ──it drains──► exit 0 ──► started again ──everybody knows that it is back──► the next one

``rolling_restart`` works on handles, wherever their processes run. Clients are behind ``Balanced``, which does what any
load balancer does, and nothing else: it sends requests to routers that are healthy.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple, Protocol

import httpx
from fleet import Process

LOOKS_EVERY = 0.2  # seconds between two looks at a router's health


class Handle(Protocol):
    """A process that can be ended and started again at its address."""

    @property
    def name(self) -> str: ...

    def terminate(self) -> None:
        """Send it SIGTERM."""

    def status(self) -> int | None:
        """What it has exited with; None while it runs."""

    def start(self) -> None:
        """Start it again; ``settled`` says when it is there."""


class Restart(NamedTuple):
    """Seconds from SIGTERM to the end, and from there until everybody knew that it was back."""

    name: str
    drained: float
    back: float


def rolling_restart(handles: Iterable[Handle], settled: Callable[[], bool], seconds: float = 60.0) -> list[Restart]:
    """Restart all, in their order. ``settled`` tells whether every process knows that every other one is there.

    Fails when one does not end with status 0, or when either takes longer than ``seconds``.
    """
    restarts = []
    for handle in handles:
        started = time.monotonic()
        handle.terminate()
        _wait_until(lambda: handle.status() is not None, seconds, f"{handle.name} to end")  # noqa: B023
        assert handle.status() == 0, f"{handle.name} ended with status {handle.status()}"
        ended = time.monotonic()
        handle.start()
        _wait_until(settled, seconds, f"{handle.name} to be back")
        restarts.append(Restart(handle.name, ended - started, time.monotonic() - ended))
    return restarts


def _wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.05)


class FleetHandle:
    """A process of tests/fleet.py."""

    def __init__(self, process: Process) -> None:
        self.process = process

    @property
    def name(self) -> str:
        return self.process.child.name

    def terminate(self) -> None:
        self.process.signal(signal.SIGTERM)

    def status(self) -> int | None:
        return self.process.child.process.returncode if self.process.child.state == "ended" else None

    def start(self) -> None:
        self.process.spawn_again()


def know_all(urls: Iterable[str], prefill: int, decode: int) -> bool:
    """Whether routers at these URLs have so many nodes ready."""
    with suppress(httpx.TransportError):
        return all(_ready(url, "prefill") == prefill and _ready(url, "decode") == decode for url in urls)
    return False


def _ready(url: str, role: str) -> float:
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    found = [line for line in lines if line.startswith("pdserve_nodes_ready{") and f'role="{role}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in found)


class Balanced(httpx.AsyncBaseTransport):
    """Sends each request to the next router that is healthy, as its health was at the latest look.

    A router that refuses the connection has not had the request, so the next one gets it. Nothing else is tried again.
    """

    def __init__(self, urls: Sequence[str], transport: httpx.AsyncBaseTransport) -> None:
        self._urls = [httpx.URL(url) for url in urls]
        self._transport = transport
        self._healthy = list(self._urls)
        self._turns = itertools.count()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        for _ in self._urls:
            url = self._healthy[next(self._turns) % len(self._healthy)]
            request.url = request.url.copy_with(host=url.host, port=url.port)
            with suppress(httpx.ConnectError):
                return await self._transport.handle_async_request(request)
        raise httpx.ConnectError("no router takes connections", request=request)

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def look(self) -> None:
        """For ever, at the health of all routers."""
        async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:
            while True:
                healthy = [url for url in self._urls if await _is_healthy(client, url)]
                self._healthy = healthy or self._healthy
                await asyncio.sleep(LOOKS_EVERY)


async def _is_healthy(client: httpx.AsyncClient, url: httpx.URL) -> bool:
    with suppress(httpx.TransportError):
        return (await client.get(url.copy_with(path="/health"))).status_code == 200
    return False


@asynccontextmanager
async def balanced(urls: Sequence[str], connections: int) -> AsyncIterator[httpx.AsyncClient]:
    """A client of so many connections, behind a balancer."""
    limits = httpx.Limits(max_connections=connections)
    transport = Balanced(urls, httpx.AsyncHTTPTransport(limits=limits, trust_env=False))
    looking = asyncio.create_task(transport.look())
    try:
        async with httpx.AsyncClient(base_url="http://balanced", transport=transport, timeout=120.0) as client:
            yield client
    finally:
        looking.cancel()
        await asyncio.wait([looking])
