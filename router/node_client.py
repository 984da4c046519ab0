"""One node as the router knows it: what it says of itself, and for a decode node the stream to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc.aio

from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb.pdserve_pb2_grpc import NodeStub
from pdserve.rpc import open_channel
from pdserve.tls import PeerTls
from router.policy import NodeView
from router.serve_stream import ServeStream

if TYPE_CHECKING:  # exists in the stubs' types only
    from pdserve.pb.pdserve_pb2_grpc import NodeAsyncStub

logger = logging.getLogger(__name__)

POLL_STARTING = 0.1  # seconds between looks at a node that is not ready
POLL_READY = 1.0  # seconds between looks at one that is
DESCRIBE_TIMEOUT = 2.0  # seconds
MAX_MISSED = 3  # looks without an answer until a node that was ready counts as hung


class NodeClient:
    """Keeps ``description`` up to date and, for a ready decode node, ``stream`` open.

    The end of a process ends its connection at once, and keepalive (pdserve/rpc.py) notices a host that is gone.
    Describe, called every second, notices the rest: restarts, changed peers, and a process that does not answer though
    its connection stands.
    """

    def __init__(self, address: str, role: str, on_change: Callable[[], None], tls: PeerTls | None = None) -> None:
        self.address = address
        self.role = role
        self.description: pb.NodeDescription | None = None
        self.stream: ServeStream | None = None
        self.prefilling = 0  # requests sent to this P that have no token yet
        self._on_change = on_change
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None
        self._task: asyncio.Task[None] | None = None
        self._missed = 0

    def start(self) -> None:
        self._channel = open_channel(self.address, tls=self._tls)
        self._task = asyncio.create_task(self._watch(NodeStub(self._channel)), name=f"watch {self.address}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self.stream is not None:
            self.stream.close("the router is shutting down")
        if self._channel is not None:
            await self._channel.close(None)

    @property
    def ready(self) -> bool:
        if self.description is None or self.description.state != "ready":
            return False
        return self.role == "prefill" or (self.stream is not None and self.stream.open)

    def view(self) -> NodeView | None:
        """None while the node has never answered."""
        node = self.description
        if node is None:
            return None
        return NodeView(
            node_id=node.node_id,
            role=self.role,
            model=node.model,
            ready=self.ready,
            compat_hash=node.compat_hash,
            in_flight=self.prefilling if self.role == "prefill" else self._calls,
            connected_peers=frozenset(node.connected_peers),
        )

    @property
    def _calls(self) -> int:
        return 0 if self.stream is None else self.stream.in_flight

    async def _watch(self, stub: NodeAsyncStub) -> None:
        while True:
            try:
                described = await stub.Describe(
                    pb.DescribeRequest(),
                    timeout=DESCRIBE_TIMEOUT,
                    wait_for_ready=not self.ready,  # a ready node that is gone is to fail at once
                )
            except grpc.aio.AioRpcError as exc:
                self._on_miss(exc)
            else:
                self._on_described(described)
            await asyncio.sleep(POLL_READY if self.ready else POLL_STARTING)

    def _on_described(self, described: pb.NodeDescription) -> None:
        self._missed = 0
        before = self.description
        if before is not None and before.epoch != described.epoch:
            logger.info("node %s at %s restarted", described.node_id, self.address)
            self._end_stream("the node was restarted")
        if described.role != self.role and (before is None or before.role != described.role):
            logger.error("%s is a %s node, not a %s node; it is not used", self.address, described.role, self.role)
        self.description = described
        usable = described.state == "ready" and described.role == self.role
        if usable and self.role == "decode" and self.stream is None and self._channel is not None:
            self.stream = ServeStream(self._channel, described.node_id, self._on_stream_end)
        if usable and (before is None or before.state != "ready"):
            logger.info("%s node %s at %s is ready", self.role, described.node_id, self.address)
        self._on_change()

    def _on_miss(self, exc: grpc.aio.AioRpcError) -> None:
        self._missed += 1
        if exc.code() == grpc.StatusCode.DEADLINE_EXCEEDED and self._missed < MAX_MISSED and self.ready:
            return
        if self.description is not None:
            logger.warning("node at %s is lost: %s", self.address, exc.details())
        self.description = None
        self._end_stream("the node does not answer")
        self._on_change()

    def _end_stream(self, reason: str) -> None:
        if self.stream is not None:
            self.stream.close(reason)

    def _on_stream_end(self, stream: ServeStream) -> None:
        if self.stream is stream:
            self.stream = None
        self._on_change()
