"""The prefill nodes that D reads from, wherever they are found: connected before D is ready, and while D runs.

Which there are is told by pdserve/discovery/; what becomes of each: decode_node/prefill_peer.py.
"""

from __future__ import annotations

import asyncio
import logging

from decode_node.background_tasks import BackgroundTasks
from decode_node.decode_metrics import DecodeMetrics
from decode_node.engine_peers import EnginePeers
from decode_node.prefill_peer import PrefillPeer, TooSlow
from decode_node.settings import DecodeSettings
from engine.frontend.node_context import NodeContext
from pdserve.discovery.sources import Directory
from pdserve.errors import ConfigError, Draining, PeerError

_log = logging.getLogger(__name__)


class PrefillPeers:
    """All prefill nodes that are listed, and those that handoffs still need."""

    def __init__(self, settings: DecodeSettings, node: NodeContext, metrics: DecodeMetrics) -> None:
        """Raises ConfigError for a place that cannot be asked from here."""
        self._settings, self._node, self._metrics = settings, node, metrics
        self._engine = EnginePeers(node.engine, node.config.peer_timing.connect_timeout, self._on_engine_lost)
        self._directory = Directory(settings.prefill, self._listed)
        self._peers: dict[str, PrefillPeer] = {}  # by address
        self._some = asyncio.Event()  # one has been connected, or is too slow
        self._too_slow: TooSlow | None = None  # the latest
        self._turn = 0  # of those that stand in for one that drains
        self._streams = BackgroundTasks()
        self._background = BackgroundTasks()
        node.engine.on_read = metrics.count_read

    def get(self, node_id: str) -> PrefillPeer:
        """The connected peer of that id; another one where that one drains. Raises PeerError or Draining."""
        named = next((peer for peer in self._peers.values() if peer.node_id == node_id), None)
        if named is not None and named.usable:
            return named
        if named is None or not named.drained:
            raise PeerError(f"prefill node {node_id} is not connected; name another one")
        other = self.other()
        if other is None:
            raise Draining(f"prefill node {node_id} is draining, and no other one is connected")
        return other

    def other(self) -> PrefillPeer | None:
        """One that is connected, in place of one that drains; they take turns."""
        usable = [peer for peer in self._peers.values() if peer.usable]
        self._turn += 1
        return usable[self._turn % len(usable)] if usable else None

    def connected_ids(self) -> list[str]:
        return [peer.node_id for peer in self._peers.values() if peer.usable]

    async def start(self, seconds: float) -> None:
        """Connect; return once every peer was tried and one is connected, but at the latest after ``seconds``.

        Raises ConfigError where a connection is slower than required.
        """
        if not self._settings.prefill:
            return
        self._background.start(self._directory.run(), "the list of prefill nodes")
        try:
            async with asyncio.timeout(seconds):
                await self._directory.complete.wait()
                for peer in list(self._peers.values()):
                    await peer.tried.wait()
                await self._some.wait()
            if self._too_slow is not None:
                raise ConfigError(str(self._too_slow))
        except TimeoutError:
            _log.warning(
                "no prefill node could be reached within %.3g s (%s): prompts are prefilled here until one can",
                seconds,
                ", ".join(self._peers) or f"none is listed at {', '.join(self._settings.prefill)}",
            )

    async def close(self) -> None:
        await self._background.close(0)
        await self._streams.close()  # what was given back is to reach the peers
        for peer in self._peers.values():
            await peer.close()

    # ------------------------------------------------------------ as peers see it

    def has(self, node_id: str) -> bool:
        return any(peer.epoch and peer.node_id == node_id for peer in self._peers.values())

    def on_connected(self) -> None:
        self._some.set()

    def on_too_slow(self, error: TooSlow) -> None:
        self._too_slow = error
        self._some.set()

    # ------------------------------------------------------------ what changes

    def _listed(self, addresses: frozenset[str]) -> None:
        for address, peer in self._peers.items():
            peer.set_listed(address in addresses)
        for address in sorted(addresses - self._peers.keys()):
            peer = self._peers[address] = PrefillPeer(
                *(address, self._node, self._engine, self._metrics.add_peer(address)),
                *(self._settings.require_transport, self._streams, self),
            )
            self._background.start(self._keep(peer), f"peer {address}")

    async def _keep(self, peer: PrefillPeer) -> None:
        """Until it has left."""
        await peer.run()
        _log.info("prefill node %s is not listed any more", peer.address)
        del self._peers[peer.address]
        self._metrics.drop_peer(peer.address)
        await peer.close()

    def _on_engine_lost(self, epoch: str, reason: str) -> None:
        for peer in self._peers.values():
            if peer.epoch == epoch:
                peer.reset(reason)
