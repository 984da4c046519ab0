"""The life cycle of a frontend process, for every role: load, connect, serve, drain, exit.

                                                          stuck  (the engine hangs; heartbeat_monitor.py)
                                                            ▲▼
    loading ──engine ready──► connecting ──role connected──► ready ──signal──► draining ──► exit 0   (drain.py)
                                                            ▲▼
                                                          new weights, asleep               (weights/changes.py)
       └────────────┴───────────── engine or start failed ─────┴──► one line on stderr, exit 1 or 2

The node answers ``Describe`` and health checks while it loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Coroutine
from typing import Any

import grpc

from node import request_checks
from node.adapters.node_adapters import NodeAdapters
from node.adapters.service import ADAPTERS_SERVICE, AdapterChangesService
from node.cache_listener import NO_LISTENER, CacheListener
from node.context import NodeContext, Role
from node.drain import ShutdownSignals, drain
from node.health import Health, NodeState
from node.metrics import NodeMetrics
from node.reports import NodeReports
from node.service import NODE_SERVICE, NodeService, add_node_service, describe
from node.weights.changes import CHANGES_SERVICE, Power, WeightChanges, WeightChangesService, WeightOrder
from node.weights.peers import WEIGHTS_SERVICE, WeightsService, find_weights
from pdserve.checkpoint.file_states import check_same_files
from pdserve.config.config_with_weights import host_digests, with_host_digests
from pdserve.config.kernels.background_compile import compiling_beside
from pdserve.config.node_config import NodeConfig
from pdserve.errors import Draining, EngineDied, NodeError, PdserveError
from pdserve.host.process import StatusWriter
from pdserve.ipc.heartbeat_monitor import LivenessWatch
from pdserve.ipc.messages import EventBatch, Ping, Progress
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.weights.change import ABORT, WeightChange

_log = logging.getLogger(__name__)

#: By role: the router's flag for such a node, and the alternative that serves HTTP.
_OF_ROUTERS = {
    "prefill": ("--prefill", " with --decode nodes"),
    "decode": ("--decode", ", or --http PORT of this command"),
    "both": ("--node", ", or --http PORT of this command"),
}
_REPORT_SECONDS = 1.0  # time for peers to learn which requests a dead engine leaves
_STOP_GRACE = 0.5  # seconds for last messages on open calls when the node exits


class Node:
    """Composes role, engine client and gRPC services."""

    def __init__(
        self,
        role: Role,
        context: NodeContext,
        server: grpc.aio.Server,
        status: StatusWriter,
        *,
        address: str,
        weights_root: str = "",
        cache_listener: CacheListener = NO_LISTENER,
    ) -> None:
        """``address`` is the server's, as other processes reach it.

        ``weights_root`` is the directory of ``--allow-weight-changes``; empty: no changes.
        """
        self._role = role
        self._context = context
        self._engine = context.engine
        self._server = server
        self._status = status
        self._address = address
        self._watch = LivenessWatch(self._engine.monitor, lambda: self._engine.send(Ping()))
        self._reports = NodeReports(lambda: describe(context, role))
        self._cache_listener = cache_listener
        self._engine.on_batch = self._on_batch
        self._engine.on_progress = self._on_progress
        self._health = Health(server, (NODE_SERVICE, WEIGHTS_SERVICE, *role.services))
        self.metrics = NodeMetrics(context, self._watch, role.metrics)
        service = NodeService(self._reports, lambda: self._engine.status, self.metrics)
        services = (WEIGHTS_SERVICE, CHANGES_SERVICE, ADAPTERS_SERVICE, *context.images.services, *role.services)
        add_node_service(server, service, services)
        pb_grpc.add_WeightsServicer_to_server(WeightsService(context), server)
        self._changes = WeightChanges(context)
        pb_grpc.add_WeightChangesServicer_to_server(WeightChangesService(context, self._changes, weights_root), server)
        self._adapters = NodeAdapters(context, self._on_adapters)
        orders = AdapterChangesService(context, self._adapters, weights_root)
        pb_grpc.add_AdapterChangesServicer_to_server(orders, server)
        self._drainable = role.attach(context, server)

    async def start_server(self) -> None:
        """Serve gRPC; the node reports that it is loading."""
        await self._enter(NodeState.LOADING)
        await self._server.start()

    async def run(self, signals: ShutdownSignals, drain_timeout: float) -> None:
        """Load, serve and drain, until a signal ends it. Raises EngineDied when the engine exits before."""
        try:
            await self._run(signals, drain_timeout)
        except Exception as exc:
            self._status.failed(exc)  # first: the parent knows the cause before routers lose this node
            if isinstance(exc, EngineDied):
                await self._report_death(exc)
            raise

    async def _run(self, signals: ShutdownSignals, drain_timeout: float) -> None:
        if not await self._unless(signals.stop, self._load()):
            return
        await self._enter(NodeState.READY)
        self._engine.on_progress = lambda progress: None  # a node that wakes does not start
        layout = self._engine.kv_layout
        self._status.ready(layout.num_tokens)
        name = self._context.config.served_model_name
        _log.info("ready for gRPC on %s: %s, %s", self._address, name, self._describe_cache())
        if not self._status.has_reader:  # a user started the node, and may try curl next
            _log.info("%s", self._describe_http())
        with compiling_beside(self._context.config):
            await self._unless(signals.stop, self._serve(drain_timeout))
        await self._enter(NodeState.DRAINING)
        _log.info("draining for %g s at most; a second signal ends this node at once", drain_timeout)
        if not await self._unless(signals.hurry, self._drain(drain_timeout, "the node shuts down")):
            self._drainable.hand_over(Draining("the node shuts down at once; send the request again"))

    async def _report_death(self, died: EngineDied) -> None:
        """Fail the dead engine's requests before their streams end, so that readers learn the suspects."""
        await self._enter(NodeState.DRAINING)
        self._engine.fail_all(died, self._context.name)
        self._role.drop_peers("the engine of this node has died")
        self._drainable.hand_over(Draining(f"{self._context.name}: {died}"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPORT_SECONDS):
                await self._drainable.wait_released()

    async def close(self) -> None:
        """End the server, the role and the engine, within 3 seconds."""
        self._reports.end()
        await self._server.stop(_STOP_GRACE if self._context.state is NodeState.DRAINING else 0)
        await self._role.close()
        self._context.images.close()
        await self._engine.shutdown()

    async def _enter(self, state: NodeState) -> None:
        """Change the state, and report it to routers and health checks."""
        self._context.state = state
        self._reports.wake()
        await self._health.show(state)

    def _on_progress(self, progress: Progress) -> None:
        self._status.loading(progress.stage, progress.fraction)

    def _on_batch(self, batch: EventBatch) -> None:
        self._reports.on_batch(batch)
        for changes in batch.cache_changes:
            self._cache_listener.publish(changes)

    def _on_adapters(self) -> None:
        """Tell routers, and listeners of the cache, of the adapters."""
        for adapter in self._context.adapters:
            if adapter.name:
                self._cache_listener.name_adapter(adapter.digest, adapter.name)
        self._reports.wake()

    def _begin_engine(self) -> None:
        """Reset reports and what listens to the cache, as an engine starts or has ended."""
        self._reports.begin_engine()
        self._cache_listener.clear()

    async def _load(self) -> None:
        started = time.monotonic()
        starting = self._start_engine(self._context.config)
        config, _ = await asyncio.gather(starting, asyncio.to_thread(request_checks.prepare))
        self._context.set_config(config)
        _log.info("engine ready after %.1f s", time.monotonic() - started)
        await self._enter(NodeState.CONNECTING)
        await self._role.connect()

    async def _start_engine(self, config: NodeConfig) -> NodeConfig:
        """Start the engine. Return the configuration with the digests of the weights, computed while it loads them.

        Other hosts send the digests of their ranks' weights. Raises ConfigError if hosts have different weights, and
        CheckpointError if the engine has loaded other files than those digested.
        """
        self._begin_engine()
        stop = threading.Event()
        peer = None if config.options.load_from == "disk" else await find_weights(self._context, config)
        digests = asyncio.to_thread(host_digests, config, self._engine.local_ranks, stop)
        try:
            ready, here = await asyncio.gather(self._engine.start(config, peer), digests)
            for files in ready.loaded_files:
                check_same_files(config.model_dir, files, here.files)
            await self._adapters.load_given()
            return with_host_digests(config, (here, *ready.digests))
        finally:
            stop.set()

    async def _serve(self, drain_timeout: float) -> None:
        """Serve, and carry out orders, until cancelled."""
        while True:
            order = await self._next_order()
            try:
                await self._carry_out(order, drain_timeout)
            finally:
                order.end(NodeError(f"{self._context.name} shuts down"))  # unless it has ended

    async def _next_order(self) -> WeightOrder:
        """Watch the engine, if it runs, until an order comes."""
        if self._context.state is NodeState.ASLEEP:
            return await self._changes.next()
        watching = asyncio.create_task(self._watch_engine(), name="engine watch")
        ordered = asyncio.create_task(self._changes.next(), name="next change of weights")
        try:
            await asyncio.wait([watching, ordered], return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()  # raises: the watch never returns
            return ordered.result()
        finally:
            watching.cancel()
            ordered.cancel()

    async def _carry_out(self, order: WeightOrder, drain_timeout: float) -> None:
        if order.action is Power.WAKE:
            await self._wake(order)
            return
        sleeps = order.action is Power.SLEEP
        reason = "the node goes to sleep" if sleeps else "the node changes its weights"
        await self._enter(NodeState.DRAINING)
        await self._drain(0.0 if order.when == ABORT else drain_timeout, reason)
        await (self._sleep(order) if sleeps else self._change_weights(order))

    async def _sleep(self, order: WeightOrder) -> None:
        """Drop the peers, then end the engine to free its memory."""
        await self._enter(NodeState.ASLEEP)
        self._role.drop_peers("this node is asleep")
        await self._engine.sleep()
        self._begin_engine()
        _log.info("asleep: weights and KV cache are freed")
        order.end()

    async def _wake(self, order: WeightOrder) -> None:
        """Start the engine again, and serve. Peers and routers see a node that has restarted."""
        await self._enter(NodeState.LOADING)
        started = time.monotonic()
        try:
            config = await self._start_engine(order.config)
        except PdserveError as exc:
            await self._engine.sleep()
            await self._enter(NodeState.ASLEEP)
            order.end(exc)
            return
        self._context.begin_epoch(config)
        self._drainable.reopen()
        await self._enter(NodeState.READY)
        _log.info(
            "awake after %.1f s: epoch %s, %s", time.monotonic() - started, self._context.epoch, self._describe_cache()
        )
        order.end()

    async def _change_weights(self, order: WeightOrder) -> None:
        """Change the weights, and serve again. Peers and routers see a node that has restarted."""
        context = self._context
        error = None
        assert isinstance(order.action, WeightChange)
        await self._enter(NodeState.LOADING)
        self._role.drop_peers("this node changes its weights")
        started = time.monotonic()
        try:
            await self._engine.change_weights(order.action)
        except EngineDied:
            raise
        except PdserveError as exc:
            error = exc
        else:
            context.begin_epoch(order.config)
            self._role.drop_peers("this node has changed its weights")
            _log.info("weights changed in %.1f s: epoch %s", time.monotonic() - started, context.epoch)
        self._drainable.reopen()
        await self._enter(NodeState.READY if self._engine.has_weights else NodeState.UNLOADED)
        order.end(error)

    async def _watch_engine(self) -> None:
        """Report engine liveness to health checks and routers until cancelled; fail requests while it is stuck."""

        healthy = self._context.state

        async def on_change(trouble: str) -> None:
            if healthy is not NodeState.DRAINING:
                await self._enter(NodeState.STUCK if trouble else healthy)
            if trouble:
                _log.error("%s: requests are refused until the engine answers", trouble)
                self._engine.refuse_all(NodeError(f"{self._context.name}: {trouble}"))
            else:
                _log.warning("the engine answers again")

        await self._watch.run(on_change)

    async def _drain(self, seconds: float, reason: str) -> None:
        watching = asyncio.create_task(self._watch_engine(), name="engine watch while draining")
        try:
            await drain(self._drainable, seconds, reason)
        finally:
            watching.cancel()

    async def _unless(self, stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
        """Await ``work``; False when ``stop`` was set first. Raises EngineDied when the engine exits meanwhile."""
        job = asyncio.create_task(work)
        stopping = asyncio.create_task(stop.wait())
        awaited: list[asyncio.Future[Any]] = [job, stopping, self._engine.closed]
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if job.done():
                job.result()
                return True
            if self._engine.closed.done():
                raise self._engine.closed.result()
            return False
        finally:
            for task in (job, stopping):
                task.cancel()
            await asyncio.wait([job, stopping])

    def _describe_http(self) -> str:
        """Return how clients get the OpenAI protocol, which nodes do not speak."""
        flag, also = _OF_ROUTERS[self._context.role]
        router = f"`pdserve router {self._context.config.model_dir} {flag} {self._address}`"
        return f"HTTP clients need a router: {router}{also}"

    def _describe_cache(self) -> str:
        config = self._context.config
        layout = self._engine.kv_layout
        return (
            f"runner {self._engine.decision.runner}, {layout.num_blocks} KV blocks of {layout.block_size} tokens "
            f"(kernel pages of {layout.kernel_block_size}), up to {config.max_model_len} tokens"
        )
