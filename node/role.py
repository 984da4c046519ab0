"""The common part of the roles: what a node reads from peers and leases to them, whatever else it serves.

A role adds its own services, in ``attach``, and its metrics. Connections, their loss and their end are the same on all
nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from prometheus_client.metrics_core import Metric

from node.leasing.leasing import Leasing
from node.reading.reading import Reading


class PeerRole:
    """Implements the part of ``node.context.Role`` that concerns peers."""

    def __init__(self, reading: Reading, leasing: Leasing | None, peer_wait: float = 0.0) -> None:
        """Without ``leasing``, no peer reads from this node. Wait at most ``peer_wait`` seconds for a prefill node."""
        self._reading = reading
        self._leasing = leasing
        self._peer_wait = peer_wait

    @property
    def leases_cache(self) -> bool:
        return self._leasing is not None

    async def connect(self) -> None:
        await self._reading.connect(self._peer_wait)

    def drop_peers(self, reason: str) -> None:
        if self._leasing is not None:
            self._leasing.drop()
        self._reading.drop(reason)

    def connected_peers(self) -> Sequence[str]:
        return self._reading.connected_ids()

    def metrics(self) -> Iterable[Metric]:
        leases = self._leasing.metrics() if self._leasing is not None else ()
        return chain(self._reading.metrics(), leases)

    async def close(self) -> None:
        if self._leasing is not None:
            self._leasing.close()
        await self._reading.close()
