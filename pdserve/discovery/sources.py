"""Places at which nodes are found, as ``--prefill`` and ``--decode`` name them.

host:port                        that address, for good
dns://name:port                  every address of a name, such as a headless service's; IPv4 and IPv6
k8s://namespace/service:port     the ready endpoints of a service, from Kubernetes' API; port is a number or a name
file:///path                     the addresses in a file, one in a line
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Protocol

from pdserve.errors import ConfigError

_ADDRESS = re.compile(r"[^\s/]+:\d{1,5}")
_DNS = re.compile(r"dns://(?P<name>[^\s/:]+):(?P<port>\d{1,5})")
_KUBERNETES = re.compile(r"k8s://(?P<namespace>[a-z0-9-]+)/(?P<service>[a-z0-9.-]+):(?P<port>[a-z0-9-]{1,15})")
_FILE = re.compile(r"file://(?P<path>/\S+)")


class NodeSource(Protocol):
    """One place. What goes wrong there is logged, and what was known before stays true until more is known."""

    def addresses(self) -> AsyncGenerator[frozenset[str], None]:
        """All addresses, host:port, as soon as they are known and whenever they have changed. Raises nothing."""


class FixedAddress:
    """An address that was given as such."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def addresses(self) -> AsyncGenerator[frozenset[str], None]:
        yield frozenset({self._address})


def parse_source(place: str) -> NodeSource:
    """The source that a place names. Raises ConfigError for what is none, or cannot be asked from here."""
    if match := _DNS.fullmatch(place):
        from pdserve.discovery.dns import DnsName

        return DnsName(match["name"], int(match["port"]))
    if match := _KUBERNETES.fullmatch(place):
        from pdserve.discovery.kubernetes import Cluster, ServiceEndpoints  # imports an HTTP client

        return ServiceEndpoints(Cluster.around(), match["namespace"], match["service"], match["port"])
    if match := _FILE.fullmatch(place):
        from pdserve.discovery.address_file import AddressFile

        return AddressFile(Path(match["path"]), check_address)
    return FixedAddress(check_address(place))


def check_source(place: str) -> str:
    """Returns it. Raises ConfigError when it names no place."""
    if any(pattern.fullmatch(place) for pattern in (_DNS, _KUBERNETES, _FILE)):
        return place
    return check_address(place)


def check_address(place: str) -> str:
    """Returns it. Raises ConfigError when it is no address."""
    if not _ADDRESS.fullmatch(place):
        raise ConfigError(
            f"{place!r} is no address; write host:port, dns://name:port, k8s://namespace/service:port or file:///path"
        )
    return place


class Directory:
    """All places of one kind of nodes. ``on_change`` gets all addresses of all of them."""

    def __init__(self, places: Sequence[str], on_change: Callable[[frozenset[str]], None]) -> None:
        """Raises ConfigError."""
        self._sources = {place: parse_source(place) for place in places}
        self._found: dict[str, frozenset[str]] = {}
        self._on_change = on_change
        self.complete = asyncio.Event()  # every place has been heard of
        if not self._sources:
            self.complete.set()

    async def run(self) -> None:
        """Look, for ever where a place may change."""
        async with asyncio.TaskGroup() as group:
            for place, source in self._sources.items():
                group.create_task(self._follow(place, source), name=f"nodes at {place}")

    async def _follow(self, place: str, source: NodeSource) -> None:
        async for addresses in source.addresses():
            self._found[place] = addresses
            self._on_change(frozenset().union(*self._found.values()))
            if len(self._found) == len(self._sources):
                self.complete.set()
