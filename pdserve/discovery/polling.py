"""Sources that do not announce changes: DNS names and address files, both polled."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.rpc.address import join_address

_log = logging.getLogger(__name__)

_DNS_INTERVAL = 5.0  # seconds; the TTL of CoreDNS in Kubernetes
_FILE_INTERVAL = 1.0  # seconds between reads


async def resolve_name(name: str, port: int) -> frozenset[str]:
    """Return all addresses of a name, host:port. Raises OSError."""
    infos = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return frozenset(join_address(str(address[0]), port) for *_, address in infos)


def dns_addresses(
    name: str,
    port: int,
    interval: float = _DNS_INTERVAL,
    resolve: Callable[[str, int], Awaitable[frozenset[str]]] = resolve_name,
) -> AsyncGenerator[frozenset[str], None]:
    return _poll(name, lambda: resolve(name, port), interval)


def file_addresses(
    path: Path, check: Callable[[str], str], interval: float = _FILE_INTERVAL
) -> AsyncGenerator[frozenset[str], None]:
    """Addresses in a file, one per line; it may be replaced at any time. Empty lines and lines with # are skipped.

    ``check`` returns an address or raises ConfigError.
    """

    def read() -> frozenset[str]:
        lines = map(str.strip, path.read_text(encoding="utf-8").splitlines())
        return frozenset(check(line) for line in lines if line and not line.startswith("#"))

    async def query() -> frozenset[str]:
        return read()

    return _poll(str(path), query, interval)


async def _poll(
    name: str, query: Callable[[], Awaitable[frozenset[str]]], interval: float
) -> AsyncGenerator[frozenset[str], None]:
    """Yield the addresses whenever they have changed.

    A failure is logged once and changes nothing: nodes outlive a DNS server, and a file may be malformed for a moment.
    """
    previous: frozenset[str] | None = None
    failure = ""
    while True:
        try:
            current = await query()
        except (OSError, UnicodeDecodeError, ConfigError) as exc:
            if str(exc) != failure:
                failure = str(exc)
                _log.warning("%s cannot be read: %s; its known addresses stay in use", name, failure)
        else:
            failure = ""
            if current != previous:
                previous = current
                yield current
        await asyncio.sleep(interval)
