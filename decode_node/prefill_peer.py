"""A prefill node that D reads from: connected, watched, and connected again when it comes back.

    trying ──Describe, Handshake, engine connects──► connected ──stream ended, other epoch, reads fail──► trying …

While connected, a stream is open that all handoffs go by (decode_node/prefill_stream.py). A peer that dies or hangs
closes its gRPC connection (keepalive, see channel.py), and with it the stream. That its engine is stuck, or its
event loop hangs, shows in Describe, which is asked again and again. Either way the peer is lost: handoffs on the stream
are told, and the engine disconnects, which ends the reads that were in flight. Attempts are spaced 0.1 → 5 s with
jitter. All limits are those of pdserve/rpc/timeouts.py.

A peer that drains, or is not listed any more, gets no new handoffs, and its connection ends with the last one. A node
that several addresses lead to is connected by one of them.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable
from contextlib import suppress
from typing import Protocol, TypeVar

import grpc

from decode_node.background_tasks import BackgroundTasks
from decode_node.decode_metrics import PeerMetrics, too_slow
from decode_node.engine_peers import EnginePeers
from decode_node.handoff import HandoffPeer
from decode_node.prefill_stream import PrefillStream
from engine.frontend.node_context import NodeContext
from pdserve.compatibility import PROTOCOL_VERSION
from pdserve.errors import ConfigError, PdserveError, PeerError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.records import Peer
from pdserve.rpc.channel import Dialer
from pdserve.rpc.errors import error_from_rpc
from pdserve.rpc.protobuf import rank_from_pb
from pdserve.transports import Connected

_log = logging.getLogger(__name__)
T = TypeVar("T")

_BACKOFF_MIN, _BACKOFF_MAX = 0.1, 5.0
_LOADING_SECONDS = 0.2  # between looks at a peer that answers, but is not ready yet


class PeerLoading(PeerError):
    """The peer is there and will be ready soon."""


class TooSlow(PeerError):
    """The connection does not take the way that ``--require-transport`` asks for."""


class Others(Protocol):
    """All peers together, as one of them sees them."""

    def has(self, node_id: str) -> bool:
        """Whether one of them is that node, connected or about to be."""

    def on_connected(self) -> None:
        """Another one is."""

    def on_too_slow(self, error: TooSlow) -> None:
        """One cannot be used."""


class PrefillPeer:
    """The prefill node at an address. ``node_id`` and ``epoch`` are those of its current life, empty while unknown."""

    def __init__(
        self,
        address: str,
        node: NodeContext,
        engine: EnginePeers,
        metrics: PeerMetrics,
        required: str,
        streams: BackgroundTasks,
        others: Others,
    ) -> None:
        self.address = address
        self.node_id = ""
        self.epoch = ""
        self.stream: PrefillStream | None = None  # while connected
        self.tried = asyncio.Event()
        self._timing = node.config.peer_timing
        self._dialer = Dialer(address, self._timing, node.tls)  # reconnects, whoever answers there
        self._use(self._dialer.channel)
        self._node = node
        self._engine = engine
        self._metrics = metrics
        self._required = required  # transport
        self._streams = streams
        self._others = others
        self._drained = False  # its latest life ended, or is about to, since it was told to
        self._leaving = False  # it is not listed any more
        self._doubt = asyncio.Event()  # something speaks against the connection: look
        self._broken = ""  # why the connector's connection must be made anew

    @property
    def usable(self) -> bool:
        """For new handoffs."""
        return self.stream is not None and not (self.stream.ended or self.stream.draining or self._leaving)

    @property
    def drained(self) -> bool:
        """It takes no handoffs since it is being restarted or taken away, which is no fault of it."""
        return self._drained or (self.stream is not None and self.stream.draining)

    def set_listed(self, listed: bool) -> None:
        """Whether it is one of those to connect to. One that is not is forgotten once no handoff needs it."""
        self._leaving = not listed
        self._doubt.set()

    def check(self) -> None:
        """A handoff failed: find out whether the peer still lives the same life."""
        self._doubt.set()

    def reset(self, reason: str) -> None:
        """Reads fail: make the connector's connection anew."""
        self._broken = reason
        self._doubt.set()

    async def close(self) -> None:
        await self._dialer.close()

    def _use(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._describer = pb_grpc.NodeStub(channel)
        self._stub = pb_grpc.PrefillNodeStub(channel)

    async def run(self) -> None:
        """Connect and stay connected, until it is not listed any more and no handoff needs it."""
        failures, said = 0, ""
        while not self._leaving:
            try:
                await self._connect()
                failures, said = 0, ""
                self.tried.set()
                await self._watch()
            except PdserveError as exc:
                if self._leaving:
                    return
                failures += not isinstance(exc, PeerLoading)
                if str(exc) != said:
                    said = str(exc)
                    _log.warning("prefill node %s: %s; trying again", self.address, said)
            finally:
                self._lose()
                self.tried.set()
            await asyncio.sleep(_backoff(failures) if failures else _LOADING_SECONDS)

    async def _connect(self) -> None:
        """Raises PeerError, DeadlineExceeded or ConfigError when it cannot be done now."""
        self._use(await self._dialer.renew())
        description = await self._describe()
        if description.role != "prefill":
            raise PeerError(f"is a {description.role} node; give --prefill the address of a prefill node")
        if description.state != "ready":
            raise PeerLoading(f"is {description.state}")
        request = pb.HandshakeRequest(
            protocol=PROTOCOL_VERSION,
            compat_hash=self._node.compat_hash,
            compat_fields=self._node.config.compat_fields,
            node_id=self._node.node_id,
            epoch=self._node.epoch,
        )
        reply = await self._call(self._stub.Handshake(request, timeout=self._timing.answer_timeout))
        if (reply.node_id, reply.epoch) != (description.node_id, description.epoch):
            raise PeerError(f"was {description.node_id} (epoch {description.epoch}) and is {reply.node_id} now")
        if self._others.has(reply.node_id):
            raise PeerError(f"is {reply.node_id}, which another address leads to, too")
        self.node_id, self.epoch = reply.node_id, reply.epoch
        self._broken = ""
        self._doubt.clear()
        try:
            ranks = tuple(rank_from_pb(rank) for rank in reply.ranks)
        except ConfigError as exc:
            raise PeerError(f"describes an impossible KV layout: {exc}") from exc
        self._metrics.epoch = reply.epoch
        connection = await self._engine.connect(Peer(reply.node_id, reply.epoch, ranks))
        self._check_transport(connection)
        self._metrics.transport = connection.transport
        self.stream = PrefillStream(
            self._stub, HandoffPeer(self.node_id, self.epoch, self._timing), self._streams, self.check
        )
        self._drained = False
        self._others.on_connected()
        _log.info("connected to prefill node %s (epoch %s) at %s", self.node_id, self.epoch, self.address)

    def _check_transport(self, connection: Connected) -> None:
        problem = too_slow(connection, self.address, self._required)
        if problem:
            self._others.on_too_slow(error := TooSlow(problem))
            raise error

    async def _watch(self) -> None:
        """Returns never; raises PeerError when the connection cannot be relied on any more."""
        # Once for all rounds: what waits for a change gRPC keeps until there is one, even when it was cancelled.
        broken = asyncio.ensure_future(self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
        broken.add_done_callback(lambda _: self._doubt.set())
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._timing.probe_after):
                        await self._doubt.wait()
                self._doubt.clear()
                await self._look()
        finally:
            broken.cancel()

    async def _look(self) -> None:
        """Raises PeerError when the connection cannot be relied on any more."""
        if self._channel.get_state() is not grpc.ChannelConnectivity.READY:
            raise PeerError("the connection broke")
        if self._broken:
            raise PeerError(f"connection made anew: {self._broken}")
        if self.stream is not None and self.stream.ended:
            raise (PeerLoading if self.stream.draining else PeerError)(self.stream.ended)
        if self._leaving and (self.stream is None or self.stream.idle):
            raise PeerError("is not listed any more")
        description = await self._describe()
        if description.epoch != self.epoch:
            raise PeerError(f"restarted: its epoch was {self.epoch} and is {description.epoch}")
        if description.state == "draining" and self.stream is not None:
            self.stream.drain()
        elif description.state != "ready":
            raise PeerLoading(f"is {description.state}")

    def _lose(self) -> None:
        if self.epoch:
            self._engine.disconnect(self.epoch)
        stream, self.stream, self.epoch, self._metrics.transport = self.stream, None, "", ""
        if stream is not None:
            self._drained = stream.draining
            self._metrics.counters["pdserve_peer_losses_total"] += not stream.draining
            stream.close(f"{self.address} was lost")

    async def _describe(self) -> pb.NodeDescription:
        return await self._call(self._describer.Describe(pb.DescribeRequest(), timeout=self._timing.answer_timeout))

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as exc:
            raise error_from_rpc(exc, self.address) from exc


def _backoff(failures: int) -> float:
    """Seconds before the next attempt: doubling, and spread so that many nodes do not knock together."""
    return min(_BACKOFF_MAX, _BACKOFF_MIN * 2.0 ** min(failures - 1, 10)) * random.uniform(0.5, 1.0)
