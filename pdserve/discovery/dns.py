"""The addresses of a DNS name, polled."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable

from pdserve.discovery.polling import polled
from pdserve.rpc.address import join_address

_INTERVAL = 5.0  # seconds; the TTL of CoreDNS in Kubernetes

Resolve = Callable[[str, int], Awaitable[frozenset[str]]]


class DnsName:
    """A name that fails to resolve keeps its addresses: nodes outlive a DNS server."""

    def __init__(self, name: str, port: int, interval: float = _INTERVAL, resolve: Resolve | None = None) -> None:
        self._name = name
        self._port = port
        self._interval = interval
        self._resolve = resolve or look_up

    def addresses(self) -> AsyncGenerator[frozenset[str], None]:
        return polled(self._name, lambda: self._resolve(self._name, self._port), self._interval)


async def look_up(name: str, port: int) -> frozenset[str]:
    """Return all addresses of a name, host:port. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return frozenset(join_address(str(address[0]), port) for *_, address in found)
