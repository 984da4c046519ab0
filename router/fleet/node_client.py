"""One node as the router sees it: its reports and, if it decodes, the stream of requests to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc.aio
import msgspec

from pdserve.adapters.adapter import NO_ADAPTER
from pdserve.config.compatibility import PROTOCOL_VERSION, describe_protocol
from pdserve.errors import PeerError
from pdserve.hashing import unpack_block_hashes
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb.pdserve_pb2_grpc import NodeStub, PoolingNodeStub
from pdserve.request_cost import RequestLoad
from pdserve.rpc.channel import Dialer
from pdserve.rpc.errors import error_from_rpc, rpc_reason
from pdserve.rpc.field_ranges import check_answer
from pdserve.rpc.message_limits import MAX_REPORTED_BLOCKS, request_limit
from pdserve.rpc.protobuf import image_cost_from_pb, image_input_from_pb, step_costs_from_pb
from pdserve.rpc.tls import PeerTls
from router.fleet.image_index import HeldImages, ImageCosts
from router.fleet.policy import BOTH, GENERATE, NodeView
from router.fleet.prefix_index import CachedBlocks, PrefixIndex
from router.fleet.serve_stream import NodeLost, ServeStream
from router.fleet.unreported import SentRequest, UnreportedRequests

if TYPE_CHECKING:  # exists in the stubs' types only
    from pdserve.pb.pdserve_pb2_grpc import NodeAsyncStub, PoolingNodeAsyncStub

logger = logging.getLogger(__name__)

_MAX_CACHED = 2 * MAX_REPORTED_BLOCKS
RETRY = 0.1  # seconds until a lost node is tried again
FAULT_PAUSE = 2.0  # seconds until a node with an invalid report is tried again
SILENCE = 4.0  # seconds without a report until a node counts as hung; reports come every second at least
REPORTED = 0.03  # seconds after which reports include a request that was sent: messages, and some decode steps
PAUSE = 0.02  # seconds between two reports of a node at least; the node's own limit
IMAGES_AT_ONCE = 3  # images on their way to a node: their pieces keep the event loop from other work


class IndexMismatch(Exception):
    """This router's index does not have the blocks, or images, that the node has cached."""


PoolCall = grpc.aio.UnaryUnaryCall[pb.PoolRequest, pb.PoolReply]


class NodeClient:
    """Keeps ``description`` and load up to date and, for a ready node that decodes, ``stream`` open. Starts at once.

    The connection ends with the node's process, and keepalive (channel.py) detects a lost host. Reports show restarts
    and changed peers, and their absence a process that hangs with its connection open.
    """

    def __init__(
        self,
        address: str,
        role: str,
        prefixes: PrefixIndex,
        on_change: Callable[[], None],
        on_idle: Callable[[NodeClient], None],
        pause: Callable[[], float],
        tls: PeerTls | None = None,
    ) -> None:
        self.address = address
        self.role = role
        self._decodes = role in ("decode", BOTH)
        self.description: pb.NodeDescription | None = None
        self.stream: ServeStream | None = None
        self.cached: CachedBlocks | None = None  # set while there is a description
        self.held_images = HeldImages()
        self.in_flight = 0  # requests of this router; prompts for peers only until their first token
        self.fault = ""  # reason why the latest report was refused; empty if it was accepted
        self.image_slots = asyncio.Semaphore(IMAGES_AT_ONCE)  # held while an image is sent to the node
        self.unlisted = False  # discovery has dropped the node: it gets no new request
        self._prefixes = prefixes
        self._on_change = on_change
        self._on_idle = on_idle
        self._find_pause = pause
        self._load = pb.NodeLoad()
        self._unreported = UnreportedRequests()
        self._view: NodeView | None = None  # None: to be computed
        self._adapters = frozenset((NO_ADAPTER,))  # digests
        self._peers: frozenset[str] = frozenset()  # node ids; replaced by a new set when they change
        self._pause = PAUSE  # seconds between reports of the present stream
        self._reported_at = 0.0
        self._read_changed_at = 0.0  # time of the latest new read costs
        self._pool_calls: dict[PoolCall, Callable[[], bool]] = {}  # → whether another node could take the call over
        self._dialer = Dialer(address, tls=tls)
        self._task = asyncio.create_task(self._watch(), name=f"watch {address}")

    async def close(self) -> None:
        self._task.cancel()
        if self.stream is not None:
            self.stream.close("the router is shutting down")
        self._forget()
        await self._dialer.close()

    @property
    def ready(self) -> bool:
        return self._usable and (not self._decodes or (self.stream is not None and self.stream.open))

    @property
    def _usable(self) -> bool:
        node = self.description
        if node is None or node.protocol != PROTOCOL_VERSION:
            return False
        return node.state == "ready" and node.role == self.role

    def view(self) -> NodeView | None:
        """None until the node has described itself."""
        node = self.description
        if self._view is not None or node is None:
            return self._view
        costs = step_costs_from_pb(self._load.throughput)
        age = asyncio.get_running_loop().time() - self._read_changed_at
        images = image_input_from_pb(node.images) if node.HasField("images") else None
        self._view = NodeView(
            node_id=node.node_id,
            role=self.role,
            model=node.model,
            ready=self.ready,
            compat_hash=node.compat_hash,
            weights=node.weights,
            protocol=node.protocol,
            connected_peers=self._peers,
            hands_off_all=node.hands_off_all,
            in_flight=self.in_flight,
            stalled=node.stalled,
            has_suspect=self.stream is not None and self.stream.suspect is not None,
            max_model_len=node.max_model_len,
            load=self._current_load(node.kv_layout),
            costs=msgspec.structs.replace(costs, read=costs.read.aged(age)),
            task=node.task or GENERATE,
            images=images,
            image_costs=None if images is None else ImageCosts(images, image_cost_from_pb(node.image_cost)),
            adapters=self._adapters,
            continued_images=image_input_from_pb(node.continued_images) if node.HasField("continued_images") else None,
        )
        return self._view

    @property
    def channel(self) -> grpc.aio.Channel:
        """The connection to the node, for calls of other services. It may be replaced after it is lost."""
        return self._dialer.channel

    async def status(self, timeout: float) -> pb.NodeStatus:
        """Query the node's status. Raises AioRpcError, also after ``timeout`` seconds, and PeerError."""
        stub: NodeAsyncStub = NodeStub(self._dialer.channel)
        status = await stub.Status(pb.StatusRequest(), timeout=timeout)
        check_answer(status)
        return status

    async def pool(
        self, message: pb.PoolRequest, num_tokens: int, timeout: float, may_leave: Callable[[], bool]
    ) -> pb.PoolReply:
        """Compute vectors of prompts on a prefill node. ``timeout`` is in seconds.

        ``may_leave`` returns whether the call may end while the node is stalled.
        Raises NodeLost, NodeError, Overloaded, RequestError or DeadlineExceeded.
        """
        assert self.description is not None, "it was chosen by its view"
        name = f"prefill node {self.description.node_id}"
        stub: PoolingNodeAsyncStub = PoolingNodeStub(self._dialer.channel)
        call = stub.Pool(message, timeout=timeout)
        self._pool_calls[call] = may_leave
        self.add_request(num_tokens, num_tokens)
        try:
            reply = await call
        except grpc.aio.AioRpcError as exc:
            if exc.code() == grpc.StatusCode.UNAVAILABLE:
                raise NodeLost(f"{name} failed: {rpc_reason(exc)}") from exc
            raise error_from_rpc(exc, name) from exc
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise NodeLost(f"{name} failed: the node does not answer") from None
        finally:
            call.cancel()
            del self._pool_calls[call]
            self.remove_request()
        check_answer(reply, name)
        return reply

    def add_request(self, uncached_tokens: int, num_tokens: int, for_peer: bool = False) -> None:
        """Count a request: prompt tokens that the node computes, tokens that need room, whether a peer decodes it."""
        self.in_flight += 1
        now = asyncio.get_running_loop().time()
        self._unreported.add(SentRequest(now, uncached_tokens, num_tokens, for_peer))
        self._view = None

    def remove_request(self) -> None:
        self.in_flight -= 1
        self._view = None
        if not self.in_flight:
            self._on_idle(self)

    @property
    def reported(self) -> pb.NodeLoad:
        """The load as the node last reported it, without requests that were sent since."""
        return self._load

    def _current_load(self, layout: pb.KVLayout) -> RequestLoad:
        """The reported load plus the requests that reports do not include yet."""
        load = self._load
        unreported = self._unreported
        block_size = max(1, layout.block_size)
        windows = tuple(window or None for window in layout.group_windows) or (None,)
        blocks = unreported.blocks(windows, block_size)
        return RequestLoad(
            requests=load.waiting + load.running + len(unreported),
            waiting=load.waiting,
            backlog=load.backlog + unreported.uncached_tokens,
            free_blocks=max(0, min(load.free_blocks, load.total_blocks) - blocks),
            total_blocks=load.total_blocks,
            block_size=block_size,
            windows=windows,
            decoding=load.decoding,
            for_peers=load.for_peers + unreported.for_peers,
            prompt_share=load.prompt_share,
            itl_target=load.itl_target_ms / 1e3,
            itl_limit=load.itl_limit_ms / 1e3,
            ttft_target=load.ttft_target_ms / 1e3,
        )

    # ------------------------------------------------------------ reports

    async def _watch(self) -> None:
        while True:
            reason = "it ends"
            stub: NodeAsyncStub = NodeStub(await self._dialer.renew())
            self._pause = max(PAUSE, self._find_pause())
            call = stub.Watch(pb.WatchRequest(pause_ms=int(1000 * self._pause)), wait_for_ready=True)
            watchdog = asyncio.create_task(self._cancel_when_silent(call))
            fault = ""
            try:
                await self._read_reports(call)
            except grpc.aio.AioRpcError as exc:
                reason = rpc_reason(exc)
            except IndexMismatch:
                reason = ""
            except PeerError as exc:
                reason = fault = str(exc)
            except Exception:  # a bug; without a watch the node's state would never change
                logger.exception("a report of the node at %s could not be handled", self.address)
                reason = fault = "its report could not be handled"
            except asyncio.CancelledError:
                if not watchdog.done():  # close() has cancelled this task
                    raise
                reason = f"it has sent no report for {SILENCE:g} s"
            finally:
                watchdog.cancel()
                call.cancel()
            if fault and fault != self.fault:
                logger.error("node at %s is not used: %s", self.address, fault)
            self.fault = fault
            if reason:
                self._on_lost(reason)
            else:
                self._rebuild_index()
            await asyncio.sleep(FAULT_PAUSE if fault else RETRY)

    async def _read_reports(self, call: grpc.aio.UnaryStreamCall[pb.WatchRequest, pb.NodeReport]) -> None:
        """Returns when the node ends the stream. Raises PeerError for a report that cannot be used."""
        sequence = 0
        async for report in call:
            sequence += 1
            check_answer(report)
            if report.sequence != sequence or (sequence == 1 and not report.HasField("description")):
                raise PeerError(f"it sent report {report.sequence} in place of {sequence}")
            self._reported_at = asyncio.get_running_loop().time()
            self._on_report(report)
            self.fault = ""

    async def _cancel_when_silent(self, call: grpc.aio.UnaryStreamCall[pb.WatchRequest, pb.NodeReport]) -> None:
        """Cancel the call of a silent node. Time in which this process was stopped does not count."""
        loop = asyncio.get_running_loop()
        self._reported_at = loop.time()
        while (silence := loop.time() - self._reported_at) < SILENCE:
            before = loop.time()
            await asyncio.sleep(min(SILENCE / 4, SILENCE - silence))
            self._reported_at += max(0.0, loop.time() - before - SILENCE / 2)
        call.cancel()

    def _on_report(self, report: pb.NodeReport) -> None:
        """Raises PeerError for blocks that cannot be cached, IndexMismatch if they are not those in the index."""
        changed = report.HasField("description")
        if changed:
            self._on_described(report.description)
        if report.load.throughput.read != self._load.throughput.read:
            self._read_changed_at = self._reported_at
        self._load = report.load
        assert self.cached is not None, "the first report has a description"
        try:
            added, removed = (unpack_block_hashes(data) for data in (report.cache.added, report.cache.removed))
        except ValueError as exc:
            raise PeerError(f"it sent a part of a block hash: {exc}") from exc
        self.cached.change(added, removed)
        if len(self.cached) > _MAX_CACHED:
            raise PeerError(f"it reports {len(self.cached)} cached blocks, the limit is {_MAX_CACHED}")
        if report.cache.HasField("digest") and report.cache.digest != self.cached.digest:
            raise IndexMismatch
        if not self.held_images.change(report.images):
            raise IndexMismatch
        assert self.description is not None, "the first report has a description"
        if self._usable and self._decodes and self.stream is None:
            node = self.description
            self.stream = ServeStream(
                self._dialer.channel,
                node.node_id,
                max_request=request_limit(node.max_model_len),
                on_change=self._on_stream_change,
                epoch=node.epoch,
            )
            changed = True
        if self.stream is not None and self.description.state == "draining":
            self.stream.drain()
        included = self._reported_at - REPORTED
        self._unreported.drop_before(included)
        self._view = None
        if changed:
            self._on_change()
        if self.stream is not None and self.description.stalled:
            self.stream.report_stall()
        if self.description.stalled:
            for call, may_leave in self._pool_calls.items():
                if may_leave():
                    call.cancel()

    def _on_described(self, described: pb.NodeDescription) -> None:
        before = self.description
        if described.role != self.role and before is None:
            logger.error("%s is a %s node, not a %s node; it is not used", self.address, described.role, self.role)
        if described.protocol != PROTOCOL_VERSION and before is None:
            logger.error("%s is not used: %s", self.address, describe_protocol(described.protocol))
        if self.cached is None:
            self.cached = self._prefixes.open(described.cache_sample_bits)
        self.description = described
        if self.stream is not None:
            self.stream.epoch = described.epoch
        self._peers = frozenset(described.connected_peers)
        self._adapters = frozenset((NO_ADAPTER, *(adapter.digest for adapter in described.adapters)))
        if self._usable and (before is None or before.state != "ready"):
            logger.info("%s node %s at %s is ready", self.role, described.node_id, self.address)

    def _on_lost(self, reason: str) -> None:
        draining = self.description is not None and self.description.state == "draining"
        if self.description is not None and not draining and not self.fault:
            logger.warning("node at %s is lost: %s", self.address, reason)
        self._forget()
        # A draining node ends the stream itself, after its requests or its time limit.
        if not draining:
            for call in self._pool_calls:
                call.cancel()
            if self.stream is not None:
                self.stream.close("the node does not answer")
        self._on_change()

    def _forget(self) -> None:
        self.description = self._view = None
        if self.cached is not None:
            self._prefixes.close(self.cached)
            self.cached = None
        self.held_images = HeldImages()

    def _rebuild_index(self) -> None:
        """Forget the node's cached blocks: the first report of the next stream has all of them. Its requests go on."""
        assert self.cached is not None
        logger.warning("the prefix index of %s is not what the node has cached: it is built again", self.address)
        self.cached = self._prefixes.rebuild(self.cached)
        self.held_images = HeldImages()
        self._on_change()

    def _on_stream_change(self) -> None:
        if self.stream is not None and self.stream.ended:
            self.stream = None
        self._view = None
        self._on_change()
