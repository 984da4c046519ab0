"""A rolling restart, as in a cluster: each process gets SIGTERM, drains, and is started again before the next one.

    for each: SIGTERM ──drain──► exit 0 ──► start ──ready, and known to routers and peers──► the next one

``rolling_restart`` works on handles of processes anywhere. Clients connect through ``LoadBalancer``, which only sends
requests to healthy routers.
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

HEALTH_POLL_SECONDS = 0.2


class Handle(Protocol):
    """A process that can be ended and started again at its address."""

    @property
    def name(self) -> str: ...

    def terminate(self) -> None:
        """Send it SIGTERM."""

    def status(self) -> int | None:
        """Return the exit status; None while the process runs."""

    def start(self) -> None:
        """Start the process again, without waiting until it is ready."""


class Restart(NamedTuple):
    """Seconds from SIGTERM to the exit, and from the exit until the fleet had settled again."""

    name: str
    drained: float
    back: float


def rolling_restart(handles: Iterable[Handle], settled: Callable[[], bool], seconds: float = 60.0) -> list[Restart]:
    """Restart all processes in order. ``settled`` returns whether all processes know each other as ready.

    Fail if an exit status is not 0, or if an exit or a start takes longer than ``seconds``.
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
    """A process of tests/support/fleet.py."""

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
        self.process.respawn()


def all_nodes_ready(urls: Iterable[str], prefill: int, decode: int) -> bool:
    """Return whether each router at these URLs reports these numbers of ready nodes."""
    with suppress(httpx.TransportError):
        return all(_ready(url, "prefill") == prefill and _ready(url, "decode") == decode for url in urls)
    return False


def _ready(url: str, role: str) -> float:
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    ready = [line for line in lines if line.startswith("pdserve_nodes_ready{") and f'role="{role}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in ready)


class LoadBalancer(httpx.AsyncBaseTransport):
    """Sends each request to the next router that was healthy at the last poll.

    A request whose connection is refused goes to the next router; no other failure is retried.
    """

    def __init__(self, urls: Sequence[str], transport: httpx.AsyncBaseTransport) -> None:
        self._urls = [httpx.URL(url) for url in urls]
        self._transport = transport
        self._healthy = list(self._urls)
        self._next_index = itertools.count()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        for _ in self._urls:
            url = self._healthy[next(self._next_index) % len(self._healthy)]
            request.url = request.url.copy_with(host=url.host, port=url.port)
            with suppress(httpx.ConnectError):
                return await self._transport.handle_async_request(request)
        raise httpx.ConnectError("no router takes connections", request=request)

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def poll_health(self) -> None:
        """Poll the health of all routers until cancelled."""
        async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:
            while True:
                healthy = [url for url in self._urls if await _is_healthy(client, url)]
                self._healthy = healthy or self._healthy
                await asyncio.sleep(HEALTH_POLL_SECONDS)


async def _is_healthy(client: httpx.AsyncClient, url: httpx.URL) -> bool:
    with suppress(httpx.TransportError):
        return (await client.get(url.copy_with(path="/health"))).status_code == 200
    return False


@asynccontextmanager
async def balanced_client(urls: Sequence[str], connections: int) -> AsyncIterator[httpx.AsyncClient]:
    """Open an HTTP client with up to ``connections`` connections behind a load balancer."""
    limits = httpx.Limits(max_connections=connections)
    transport = LoadBalancer(urls, httpx.AsyncHTTPTransport(limits=limits, trust_env=False))
    polling = asyncio.create_task(transport.poll_health())
    try:
        async with httpx.AsyncClient(base_url="http://balanced", transport=transport, timeout=120.0) as client:
            yield client
    finally:
        polling.cancel()
        await asyncio.wait([polling])
