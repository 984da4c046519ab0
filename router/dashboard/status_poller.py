"""Polls Node.Status once a second while a dashboard is open, once for all viewers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import grpc.aio

from pdserve.errors import PeerError
from router.dashboard.node_rates import ExposedLatency, NodeHistory, parse_status
from router.fleet.node_client import NodeClient
from router.fleet.nodes import Nodes

VIEWER_TIMEOUT = 5.0  # seconds without a request until polling stops
_PERIOD = 1.0  # seconds
_MAX_POLLED = 64  # nodes per period; larger fleets are polled round-robin
_MAX_CONCURRENT = 8  # calls, so that their responses do not delay tokens
_TIMEOUT = 1.0  # seconds per call

Key = tuple[str, str]  # role and address of a node


class StatusPoller:
    """``histories`` holds the nodes polled lately; it is empty without viewers."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._viewed_until = 0.0
        self._task: asyncio.Task[None] | None = None
        self._next_index = 0
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)
        self.histories: Mapping[Key, NodeHistory] = {}
        self.exposed = ExposedLatency()

    def on_view(self) -> None:
        """Poll for the next VIEWER_TIMEOUT seconds."""
        self._viewed_until = asyncio.get_running_loop().time() + VIEWER_TIMEOUT
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="status poller")

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while (started := loop.time()) < self._viewed_until:
            await self._poll_nodes()
            await asyncio.sleep(started + _PERIOD - loop.time())
        self.histories = {}
        self.exposed = ExposedLatency()

    async def _poll_nodes(self) -> None:
        alive = {(node.role, node.address): node for node in self._nodes if node.description is not None}
        self.histories = {key: self.histories.get(key) or NodeHistory() for key in alive}
        keys = sorted(alive)
        start = self._next_index % len(keys) if len(keys) > _MAX_POLLED else 0
        self._next_index = start + _MAX_POLLED
        chosen = [*keys[start:], *keys[:start]][:_MAX_POLLED]
        await asyncio.gather(*(self._poll(alive[key], self.histories[key]) for key in chosen))

    async def _poll(self, node: NodeClient, history: NodeHistory) -> None:
        async with self._slots:
            if node.description is None:
                return
            epoch = node.description.epoch
            try:
                status = await node.status(_TIMEOUT)
            except (grpc.aio.AioRpcError, PeerError):
                return  # the node's Watch stream detects a lost node
            at = asyncio.get_running_loop().time()
            try:
                sample = parse_status(at, epoch, status)
            except (KeyError, ValueError):
                return  # the labels of a series are not those of this release
            self.exposed.add(at, history.add(sample))
