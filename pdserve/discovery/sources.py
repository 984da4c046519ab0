"""Node sources, as ``--prefill`` and ``--decode`` name them.

host:port                        a fixed address
dns://name:port                  all addresses of a name, such as a headless service's; IPv4 and IPv6
k8s://namespace/service:port     the ready endpoints of a service, from Kubernetes' API; port is a number or a name
file:///path                     the addresses in a file, one per line
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

from pdserve.discovery.polling import dns_addresses, file_addresses
from pdserve.errors import ConfigError

ADDRESS_FORMS = "host:port, dns://name:port, k8s://namespace/service:port or file:///path"

_ADDRESS = re.compile(r"[^\s/]+:\d{1,5}")
_DNS = re.compile(r"dns://(?P<name>[^\s/:]+):(?P<port>\d{1,5})")
_KUBERNETES = re.compile(r"k8s://(?P<namespace>[a-z0-9-]+)/(?P<service>[a-z0-9.-]+):(?P<port>[a-z0-9-]{1,15})")
_FILE = re.compile(r"file://(?P<path>/\S+)")


def source_addresses(text: str) -> AsyncGenerator[frozenset[str], None]:
    """Return the generator of a source. It yields all addresses, host:port, at first and after each change.

    It raises nothing: errors are logged, and the known addresses stay until the source answers again. This function
    raises ConfigError if the source is malformed or not usable here.
    """
    if match := _DNS.fullmatch(text):
        return dns_addresses(match["name"], int(match["port"]))
    if match := _KUBERNETES.fullmatch(text):
        from pdserve.discovery.kubernetes import Cluster, ServiceEndpoints  # imports an HTTP client

        return ServiceEndpoints(
            Cluster.from_environment(), match["namespace"], match["service"], match["port"]
        ).addresses()
    if match := _FILE.fullmatch(text):
        return file_addresses(Path(match["path"]), check_address)
    return _fixed(check_address(text))


async def _fixed(address: str) -> AsyncGenerator[frozenset[str], None]:
    yield frozenset({address})


def check_source(text: str) -> str:
    """Return the text of a source. Raises ConfigError if it is malformed."""
    return text if any(pattern.fullmatch(text) for pattern in (_DNS, _KUBERNETES, _FILE)) else check_address(text)


def check_sources(text: str) -> tuple[str, ...]:
    """Return the sources of a text with commas. Raises ConfigError if one is malformed."""
    return tuple(check_source(source) for source in text.split(","))


def check_address(text: str) -> str:
    """Return the address. Raises ConfigError if it is malformed."""
    if not _ADDRESS.fullmatch(text):
        raise ConfigError(f"{text!r} is not an address; write {ADDRESS_FORMS}")
    return text


class Directory:
    """All sources of one node role. ``on_change`` receives the addresses of all of them together."""

    def __init__(self, texts: Sequence[str], on_change: Callable[[frozenset[str]], None]) -> None:
        """Raises ConfigError."""
        self._sources = {text: source_addresses(text) for text in texts}
        self._found: dict[str, frozenset[str]] = {}
        self._on_change = on_change
        self.complete = asyncio.Event()  # every source has answered
        if not self._sources:
            self.complete.set()

    async def run(self) -> None:
        """Follow all sources; returns only if none of them can change. Called once."""
        async with asyncio.TaskGroup() as group:
            for text, addresses in self._sources.items():
                group.create_task(self._follow(text, addresses), name=f"nodes at {text}")

    async def _follow(self, text: str, source: AsyncGenerator[frozenset[str], None]) -> None:
        async for addresses in source:
            self._found[text] = addresses
            self._on_change(frozenset().union(*self._found.values()))
            if len(self._found) == len(self._sources):
                self.complete.set()
