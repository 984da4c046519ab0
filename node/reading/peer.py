"""The connection to one node that KV is read from: made, checked, and made again when the node comes back.

    connecting ──Describe, Handshake, engine connects──► connected ──stream ended, other epoch, reads fail──┐
         ▲                                                                                                  │
         └──────────────────────────────────────────────────────────────────────────────────────────────────┘

While connected, a stream carries all handoffs (node/reading/peer_stream.py). gRPC keepalive closes the connection to
a dead or hung host, and with it the stream. Repeated Describe calls find a stuck engine or a hung event loop. A lost
peer fails the handoffs on its stream; the engine disconnects, which ends reads in flight. Attempts are spaced
0.1 → 5 s with jitter. The timeouts are in pdserve/rpc/timeouts.py.

A peer that drains or is no longer listed gets no new handoffs; its connection ends with the last one. A node with
several addresses is connected through one of them. A source may list this node itself, which is left out.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from node.context import NodeContext
from node.health import NodeState
from node.reading.peer_stream import PeerStream
from node.reading.reading_metrics import PeerMetrics
from pdserve.config.compatibility import PROTOCOL_VERSION, describe_protocol
from pdserve.errors import ConfigError, PdserveError, PeerError, shown
from pdserve.ipc.messages import Connect, Disconnect
from pdserve.kv.transports import Connected
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.records import Peer
from pdserve.rpc.channel import Dialer
from pdserve.rpc.errors import error_from_rpc
from pdserve.rpc.field_ranges import check_answer
from pdserve.rpc.message_limits import request_limit
from pdserve.rpc.protobuf import rank_from_pb

_log = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)

_BACKOFF_MIN = 0.1  # seconds until the second attempt
_BACKOFF_MAX = 5.0  # seconds between attempts, at most
_RELEASE_SECONDS = 0.5  # time for P to receive releases of leases before this node closes its connection
_LOADING_SECONDS = 0.2  # pause between attempts at a peer that is not ready yet
_START_SECONDS = 60.0  # time for a peer that starts with this node to listen; then it is missed
_NOTHING_LOGGED = (logging.NOTSET, "")  # level and text of the latest failure in the log
_SELF_FAILURES = 10  # counted at this node's own address: long pauses, as another node may get the address


class PeerLoading(PeerError):
    """The peer answers and will be ready soon."""


class OwnAddress(PeerError):
    """The address is this node's own: no connection is needed."""


class TransportTooSlow(PeerError):
    """The connection's transport is slower than ``--require-transport``."""


class PeerRegistry(Protocol):
    """The set of all peers of this node."""

    def has(self, node_id: str) -> bool:
        """Return whether a peer with this id is connected or connecting."""

    def on_connected(self, peer: KVPeer) -> None:
        """A peer has connected."""

    def on_too_slow(self, peer: KVPeer, error: TransportTooSlow) -> None:
        """A peer was refused for its transport."""


class KVPeer:
    """The node at an address. ``node_id`` and ``epoch`` are empty while unknown."""

    def __init__(
        self,
        address: str,
        node: NodeContext,
        metrics: PeerMetrics,
        registry: PeerRegistry,
        required_transport: str,
        *,
        as_source: bool,
    ) -> None:
        """``as_source``: a decode node is welcome, too, for its prefix cache."""
        self.address = address
        self.node_id = ""
        self.epoch = ""
        self.computes = True  # the peer computes prompts, as far as known; False: it only leases cached blocks
        self.stream: PeerStream | None = None  # while connected
        self.tried = asyncio.Event()
        self._timing = node.config.options.peer_timing
        self._dialer = Dialer(address, self._timing, node.tls)
        self._node = node
        self._metrics = metrics
        self._registry = registry
        self._required_transport = required_transport
        self._connecting: asyncio.Future[Connected] | None = None  # the connector's answer
        self._closing: PeerStream | None = None  # the previous stream, which may still deliver releases
        self._drained = False  # the latest epoch ended by draining
        self._answered = False
        self._expected_at = 0.0
        self._unlisted = False
        self._as_source = as_source
        self._check_now = asyncio.Event()
        self._broken = ""  # why the connector must reconnect

    @property
    def usable(self) -> bool:
        """The peer takes new handoffs."""
        return self.stream is not None and not (self.stream.ended or self.stream.draining or self._unlisted)

    @property
    def drained(self) -> bool:
        """The peer takes no handoffs because it shuts down, which is no failure."""
        return self._drained or (self.stream is not None and self.stream.draining)

    @property
    def name(self) -> str:
        """Role and address, for logs."""
        role = "" if self._as_source and not self._answered else "prefill " if self.computes else "decode "
        return f"{role}node {self.address}"

    def set_listed(self, listed: bool, *, as_source: bool) -> None:
        """Connect to the peer while it is listed. An unlisted peer is dropped when no handoff needs it."""
        self._unlisted = not listed
        self._as_source = as_source
        self._check_now.set()

    def check(self) -> None:
        """Check soon whether the peer still answers with the same epoch."""
        self._check_now.set()

    def reset(self, reason: str) -> None:
        """Have the connector reconnect, since reads fail."""
        self._broken = reason
        self._check_now.set()

    def drop(self, reason: str) -> None:
        """Take no more handoffs at once, and reconnect."""
        if self.stream is not None:
            self.stream.close(reason)
        self.reset(reason)

    async def close(self) -> None:
        """Close the connection once the last stream has delivered its releases."""
        if self._closing is not None:
            await self._closing.closed(_RELEASE_SECONDS)
        await self._dialer.close()

    def on_connector_connected(self, connection: Connected) -> None:
        if self._connecting is not None and not self._connecting.done():
            self._connecting.set_result(connection)

    def on_connector_failed(self, reason: str) -> None:
        """The connector cannot connect, or has lost the connection."""
        if self._connecting is None:
            self.reset(reason)
        elif not self._connecting.done():
            self._connecting.set_exception(PeerError(f"the connector cannot connect: {reason}"))

    async def run(self) -> None:
        """Connect and stay connected until the peer is unlisted and no handoff needs it."""
        failures = 0
        logged = _NOTHING_LOGGED
        self._expected_at = time.monotonic() + _START_SECONDS
        while not self._unlisted:
            try:
                await self._connect()
                failures = 0
                logged = _NOTHING_LOGGED
                self.tried.set()
                await self._watch()
            except OwnAddress:
                failures = _SELF_FAILURES
            except PdserveError as exc:
                if self._unlisted:
                    return
                failures += not isinstance(exc, PeerLoading)
                level = self._level(exc)
                if (level, str(exc)) != logged:
                    logged = (level, str(exc))
                    _log.log(level, "%s: %s; trying again", self.name, exc)
            finally:
                self._disconnect()
                self.tried.set()
            await asyncio.sleep(_backoff(failures) if failures else _LOADING_SECONDS)

    def _level(self, error: PdserveError) -> int:
        """Return INFO for failures that belong to the start, drain or restart of a peer, else WARNING."""
        starts = not self._answered and time.monotonic() < self._expected_at
        return logging.INFO if isinstance(error, PeerLoading) or self.drained or starts else logging.WARNING

    async def _connect(self) -> None:
        """Raises PdserveError when the peer cannot be connected now."""
        self._check_own_state()
        stub: pb_grpc.PrefillNodeAsyncStub = pb_grpc.PrefillNodeStub(await self._dialer.renew())
        description = await self._describe()
        self._answered = True
        self._check_identity(description)
        if (state := _state(description)) != "ready":
            raise PeerLoading(f"is {state}")
        if description.protocol != PROTOCOL_VERSION:
            raise PeerError(describe_protocol(description.protocol))
        own_epoch = self._node.epoch
        reply = await self._shake_hands(stub, description)
        self.node_id = reply.node_id
        self.epoch = reply.epoch
        self._broken = ""
        self._check_now.clear()
        peer = self._read_layouts(reply)
        connection = await self._connect_connector(peer)
        if own_epoch != self._node.epoch:
            raise PeerLoading("was asked before this node changed its weights")
        self._check_own_state()  # this node may change its weights now
        self._check_transport(connection)
        self._metrics.transport = connection.transport
        limit = request_limit(description.max_model_len)
        self.stream = PeerStream(stub, peer, max_request=limit, on_change=self.check)
        self._drained = False
        self._registry.on_connected(self)
        role = "prefill" if self.computes else "decode"
        _log.info("connected to %s node %s (epoch %s) at %s", role, self.node_id, self.epoch, self.address)

    async def _shake_hands(
        self, stub: pb_grpc.PrefillNodeAsyncStub, description: pb.NodeDescription
    ) -> pb.HandshakeReply:
        """Raises PeerError if another node answers than the described one, or one that is connected already."""
        request = pb.HandshakeRequest(
            protocol=PROTOCOL_VERSION,
            compat_hash=self._node.compat_hash,
            compat_fields=self._node.config.compat_fields,
            node_id=self._node.node_id,
            epoch=self._node.epoch,
        )
        reply = await self._call(stub.Handshake(request, timeout=self._timing.answer_timeout))
        if (reply.node_id, reply.epoch) != (description.node_id, description.epoch):
            raise PeerError(f"was {description.node_id} (epoch {description.epoch}) and is {reply.node_id} now")
        if self._registry.has(reply.node_id):
            raise PeerError(f"is {reply.node_id}, which is connected through another address")
        return reply

    def _read_layouts(self, reply: pb.HandshakeReply) -> Peer:
        """Return the peer that the connector connects to. Raises PeerError for layouts that cannot be."""
        try:
            ranks = tuple(rank_from_pb(rank) for rank in reply.ranks)
        except ConfigError as exc:
            raise PeerError(f"describes an impossible KV layout: {exc}") from exc
        self._metrics.epoch = reply.epoch
        drafts = self._node.config.drafts_by
        peer = Peer(
            reply.node_id, reply.epoch, ranks, other_drafts=bool(drafts and reply.drafts) and drafts != reply.drafts
        )
        if peer.other_drafts:
            _log.warning(
                "node %s drafts by %s, this node by %s: requests that it hands off get no drafts here; start "
                "both with the same --speculate",
                reply.node_id,
                shown(reply.drafts),
                drafts,
            )
        return peer

    async def _connect_connector(self, peer: Peer) -> Connected:
        """Have the engine's connector connect. Raises PeerError when it cannot."""
        self._connecting = asyncio.get_running_loop().create_future()
        self._node.engine.send(Connect(peer))
        try:
            return await asyncio.wait_for(self._connecting, self._timing.connect_timeout)
        except TimeoutError as exc:
            limit = self._timing.connect_timeout
            raise PeerError(f"the connector did not connect within {limit:.3g} s") from exc
        finally:
            self._connecting = None

    def _check_own_state(self) -> None:
        """Raises PeerLoading while this node has no weights to exchange KV for."""
        if self._node.state in (NodeState.LOADING, NodeState.ASLEEP):
            raise PeerLoading(f"waits for this node, which is {self._node.state}")

    def _check_identity(self, description: pb.NodeDescription) -> None:
        """Raises OwnAddress for this node, PeerError for a node that leases no KV."""
        own = self._metrics.is_own = description.epoch == self._node.epoch
        if own:
            raise OwnAddress(f"is this node, {self._node.node_id}")
        self.computes = description.role in ("prefill", "both")
        if not self.computes and not self._as_source:
            raise PeerError(f"is a {description.role} node; give --prefill the address of a prefill node")
        if not self.computes and not description.leases_cache:
            raise PeerError("leases no KV: a decode node does with --prefill or --kv-source, from this release on")
        if description.node_id == self._node.node_id:
            raise PeerError(f"is {description.node_id}, as this node is; give each node a --node-id of its own")

    def _check_transport(self, connection: Connected) -> None:
        """Raises TransportTooSlow if the transport does not meet ``--require-transport``."""
        if shortfall := connection.shortfall(self._required_transport):
            error = TransportTooSlow(f"the transport to {self.address} {shortfall}")
            self._registry.on_too_slow(self, error)
            raise error

    async def _watch(self) -> None:
        """Check the connection periodically and on suspicion. Raises PdserveError when it is lost; never returns."""
        channel = self._dialer.channel
        # One waiter for all rounds: gRPC keeps each waiter until the state changes, even a cancelled one.
        broken = asyncio.ensure_future(channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
        broken.add_done_callback(lambda _: self._check_now.set())
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._timing.probe_after):
                        await self._check_now.wait()
                self._check_now.clear()
                await self._check_connection()
        finally:
            broken.cancel()

    async def _check_connection(self) -> None:
        """Raises PdserveError when the connection is lost."""
        if self._dialer.channel.get_state() is not grpc.ChannelConnectivity.READY:
            raise PeerError("the connection broke")
        if self._broken:
            raise PeerError(f"reconnecting: {self._broken}")
        if self.stream is not None and self.stream.ended:
            raise (PeerLoading if self.stream.draining else PeerError)(self.stream.end_reason)
        if self._unlisted and (self.stream is None or self.stream.idle):
            raise PeerError("is no longer listed")
        description = await self._describe()
        if description.epoch != self.epoch:
            raise PeerError(f"restarted: its epoch was {self.epoch} and is {description.epoch}")
        if description.state == "draining" and self.stream is not None:
            self.stream.drain()
        elif (state := _state(description)) != "ready":
            raise PeerLoading(f"is {state}")

    def _disconnect(self) -> None:
        if self.epoch:
            self._node.engine.send(Disconnect(self.epoch))  # the peer's reads in flight end with an error
        self.epoch = ""
        self._metrics.transport = ""
        if self.stream is not None:
            self._closing = self.stream
            self.stream = None
            self._drained = self._closing.draining
            self._metrics.counters.peer_losses += not self._drained
            self._closing.close(f"{self.address} was lost")

    async def _describe(self) -> pb.NodeDescription:
        stub: pb_grpc.NodeAsyncStub = pb_grpc.NodeStub(self._dialer.channel)
        return await self._call(stub.Describe(pb.DescribeRequest(), timeout=self._timing.answer_timeout))

    async def _call(self, call: Awaitable[M]) -> M:
        try:
            reply = await call
        except grpc.aio.AioRpcError as exc:
            raise error_from_rpc(exc, self.address) from exc
        check_answer(reply)
        return reply


def _state(description: pb.NodeDescription) -> str:
    return "stalled in a step" if description.stalled else description.state


def _backoff(failures: int) -> float:
    """Return the seconds until the next attempt: doubling, with jitter against simultaneous attempts of many nodes."""
    return min(_BACKOFF_MAX, _BACKOFF_MIN * 2.0 ** min(failures - 1, 10)) * random.uniform(0.5, 1.0)
