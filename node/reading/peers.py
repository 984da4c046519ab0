"""All nodes that this node reads from: found through discovery, connected before it is ready and while it runs.

Prefill nodes compute prompts for this node, if it decodes. Of other nodes it reads cached prefixes only.

pdserve/discovery/ lists their addresses; node/reading/peer.py keeps the connection to each.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence

import msgspec

from node.context import NodeContext
from node.reading.peer import KVPeer, TransportTooSlow
from node.reading.reading_metrics import ReadingMetrics
from pdserve.discovery.sources import Directory
from pdserve.errors import ConfigError, Draining, PeerError
from pdserve.ipc.messages import ReadEnded
from pdserve.kv.transports import Connected
from pdserve.request_cost import LoadPlan, Pace, RequestLoad, StepCosts, plan_pull, prompt_pace, pull_deadline

_log = logging.getLogger(__name__)


class KVPeers:
    """The listed nodes, and unlisted ones that handoffs still need."""

    def __init__(
        self,
        node: NodeContext,
        metrics: ReadingMetrics,
        *,
        prefill: Sequence[str],
        others: Sequence[str],
        required_transport: str,
    ) -> None:
        """Find prefill nodes, and others whose cache may be read, in sources of pdserve/discovery/sources.py.

        An empty ``required_transport`` accepts any.

        Raises ConfigError for a source that this machine cannot query.
        """
        self._sources = tuple(prefill)
        self._required_transport = required_transport
        self._node = node
        self.metrics = metrics
        self._prefill = Directory(self._sources, self._on_prefill_listed)
        self._others = Directory(others, self._on_others_listed)
        self._listed_prefill: frozenset[str] = frozenset()  # addresses
        self._listed_others: frozenset[str] = frozenset()
        self._read_at = 0.0  # when a read last ended
        self._peers: dict[str, KVPeer] = {}  # by address
        self._first = asyncio.Event()  # a prefill node has connected, or was refused for its transport
        self._too_slow: TransportTooSlow | None = None  # latest
        self._next_other = 0  # round robin over substitutes of a draining peer
        self._tasks: set[asyncio.Task[None]] = set()
        node.engine.on_connected = self._on_connector_connected
        node.engine.on_failed_peer = self._on_connector_failed
        node.engine.on_read = self._on_read
        node.engine.on_read_checked = metrics.count_checked

    @property
    def costs(self) -> StepCosts:
        """This node's measured costs. The cost of reads decays without reads, so that a slow path is tried again."""
        costs = self._node.engine.status.costs
        return msgspec.structs.replace(costs, read=costs.read.aged(time.monotonic() - self._read_at))

    def plan_pull(self, num_tokens: int) -> LoadPlan | None:
        """Return how to get the KV of ``num_tokens`` tokens that a peer has cached; None: compute them."""
        if num_tokens <= 0:
            return None
        return plan_pull(self.costs, num_tokens, pace=self._pace, split_block=self._node.config.split_block)

    def pull_deadline(self, num_tokens: int) -> float:
        """Return the seconds after which a pull of ``num_tokens`` tokens is given up."""
        return pull_deadline(self.costs, num_tokens, self._pace.queued)

    @property
    def _pace(self) -> Pace:
        """Predicted progress of a new prompt on this node."""
        status = self._node.engine.status
        return prompt_pace(RequestLoad(itl_target=status.itl_target), status.costs, status.backlog, status.decoding)

    def find(self, node_id: str) -> KVPeer | None:
        """Return the peer with this id, of any role, if it takes new requests."""
        return next((peer for peer in self._peers.values() if peer.node_id == node_id and peer.usable), None)

    def get(self, node_id: str) -> KVPeer:
        """Return the connected peer with this id, or another prefill node if it drains.

        Raises PeerError if it is not connected, Draining if it drains and no other prefill node is connected.
        """
        peer = self.find(node_id)
        if peer is not None:
            return peer
        named = next((peer for peer in self._peers.values() if peer.node_id == node_id), None)
        if named is None or not named.drained:
            raise PeerError(f"prefill node {node_id} is not connected; name another one")
        other = self.other()
        if other is None:
            raise Draining(f"prefill node {node_id} is draining, and no other prefill node is connected")
        return other

    def other(self) -> KVPeer | None:
        """Return a connected prefill node in place of a draining one, round robin; None without one."""
        usable = [peer for peer in self._peers.values() if peer.usable and peer.computes]
        self._next_other += 1
        return usable[self._next_other % len(usable)] if usable else None

    def connected_ids(self) -> list[str]:
        return [peer.node_id for peer in self._peers.values() if peer.usable]

    async def start(self, seconds: float) -> None:
        """Connect. Return when every prefill node was tried and one is connected, or after ``seconds``.

        A node that prefills itself waits for no connection: nodes that start together would wait for each other. No
        node waits for peers that only lease their cache.
        Raises ConfigError if a transport is slower than ``--require-transport``.
        """
        self._start(self._others.run(), "discovery of nodes to pull from")
        if not self._sources:
            return
        self._start(self._prefill.run(), "discovery of prefill nodes")
        try:
            async with asyncio.timeout(seconds):
                await self._prefill.complete.wait()
                for address in self._listed_prefill:
                    await self._peers[address].tried.wait()
                if self._node.role == "decode":
                    await self._first.wait()
            if self._too_slow is not None:
                raise ConfigError(str(self._too_slow))
        except TimeoutError:
            _log.warning(
                "no prefill node could be reached within %.3g s (%s): prompts are prefilled on this node until one can",
                seconds,
                ", ".join(self._listed_prefill) or f"none is listed at {', '.join(self._sources)}",
            )

    def drop(self, reason: str) -> None:
        """Drop all connections at once, and make them again while the node is ready."""
        for peer in self._peers.values():
            peer.drop(reason)

    async def close(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(peer.close() for peer in self._peers.values()))

    # ------------------------------------------------------------ PeerRegistry

    def has(self, node_id: str) -> bool:
        return any(peer.epoch and peer.node_id == node_id for peer in self._peers.values())

    def on_connected(self, peer: KVPeer) -> None:
        if peer.computes:
            self._first.set()

    def on_too_slow(self, peer: KVPeer, error: TransportTooSlow) -> None:
        if peer.address in self._listed_prefill:
            self._too_slow = error
            self._first.set()

    # ------------------------------------------------------------ changes

    def _on_prefill_listed(self, addresses: frozenset[str]) -> None:
        self._listed_prefill = addresses
        self._on_listed()

    def _on_others_listed(self, addresses: frozenset[str]) -> None:
        self._listed_others = addresses
        self._on_listed()

    def _on_listed(self) -> None:
        addresses = self._listed_prefill | self._listed_others
        for address, peer in self._peers.items():
            peer.set_listed(address in addresses, as_source=address in self._listed_others)
        for address in sorted(addresses - self._peers.keys()):
            peer = self._peers[address] = KVPeer(
                address,
                self._node,
                self.metrics.add_peer(address),
                registry=self,
                required_transport=self._required_transport,
                as_source=address in self._listed_others,
            )
            self._start(self._run_peer(peer), f"peer {address}")

    async def _run_peer(self, peer: KVPeer) -> None:
        await peer.run()
        _log.info("%s is no longer listed", peer.name)
        del self._peers[peer.address]
        self.metrics.drop_peer(peer.address)
        await peer.close()

    def _on_read(self, read: ReadEnded) -> None:
        self._read_at = time.monotonic()
        self.metrics.count_read(read)

    def _on_connector_connected(self, connection: Connected) -> None:
        for peer in self._peers.values():
            if peer.epoch == connection.epoch:
                peer.on_connector_connected(connection)

    def _on_connector_failed(self, epoch: str, reason: str) -> None:
        for peer in self._peers.values():
            if peer.epoch == epoch:
                peer.on_connector_failed(reason)

    def _start(self, coroutine: Coroutine[None, None, None], name: str) -> None:
        """Run a coroutine until ``close``."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)
