"""The front of a node, whichever its role: bind, load, connect, serve, stop.

                                                          stuck  (the engine does not answer; heartbeat_monitor.py)
                                                            ▲▼
    loading ──engine ready──► connecting ──role connected──► ready ──signal──► draining ──► exit 0   (drain.py)
       └────────────┴───────────── engine or start failed ─────┴──► one line on stderr, exit 1 or 2

The port is bound before anything is loaded, so that a taken one is found at once, and the node answers ``Describe`` and
health checks while it loads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import grpc
import uvloop
from prometheus_client.metrics_core import Metric

from engine.executor.host_flags import HostRanks, add_host_flags, hosted_from
from engine.executor.remote_host import run_ranks
from engine.frontend.drain import Drained, ShutdownSignals, drain
from engine.frontend.engine_client import EngineClient
from engine.frontend.frontend_flags import FrontOptions, add_front_flags, front_options_from
from engine.frontend.health import Health, State
from engine.frontend.node_metrics import NodeMetrics
from engine.frontend.node_reports import NodeReports
from engine.frontend.node_service import NODE_SERVICE, add_node_service, describe
from engine.ipc.messages import Posts, Progress
from engine.liveness.heartbeat_monitor import LivenessWatch
from pdserve.compatibility import compat_hash
from pdserve.config.device import node_devices
from pdserve.config.flags import CommandParser, add_node_flags, options_from
from pdserve.config.node_config import NodeConfig, NodeOptions
from pdserve.config.resolve import resolve
from pdserve.errors import Draining, NodeError
from pdserve.exits import run_command
from pdserve.kv import KVLayout
from pdserve.logs import set_process_fields, setup_logging
from pdserve.process import StatusWriter, one_line, watch_lifeline
from pdserve.rpc import channel as rpc
from pdserve.rpc.timeouts import PeerTiming
from pdserve.rpc.tls import PeerTls
from pdserve.tracing.spans import NO_TRACER, Tracer
from pdserve.tracing.trace_flags import make_tracer

if TYPE_CHECKING:
    from engine.frontend.metrics_server import MetricsServer

_log = logging.getLogger(__name__)

_STOP_GRACE = 0.5  # seconds for the last words on calls that are in flight when the node ends


class Role(Protocol):
    """What a prefill or decode node adds to the front."""

    name: str  # "prefill" or "decode"
    services: tuple[str, ...]  # full names of its gRPC services
    uses_connector: bool

    def attach(self, node: Node) -> Drained:
        """Register servicers at ``node.server`` and callbacks at ``node.link``. The engine has not been started yet.

        Returns what has to end before the node does.
        """

    async def connect(self) -> None:
        """Whatever must be there before the node is ready, within a bound. The engine is ready."""

    def connected_peers(self) -> Sequence[str]:
        """Node ids that KV can be read from."""

    def metrics(self) -> Iterable[Metric]:
        """What only this kind of node counts."""

    async def close(self) -> None:
        """End tasks and channels. Idempotent."""


class Node:
    """One life of a node: who it is, its engine, its server. Roles and servicers hold on to it."""

    def __init__(
        self,
        role: Role,
        config: NodeConfig,
        posts: Posts,
        server: grpc.aio.Server,
        node_id: str,
        tls: PeerTls | None = None,
    ) -> None:
        self.role = role
        self.config = config
        self.server = server
        self.node_id = node_id
        self.tls = tls  # to speak to other nodes with
        self.tracer: Tracer = NO_TRACER
        self.log_requests = False
        self.epoch = secrets.token_hex(8)
        self.compat_hash = compat_hash(config.compat_fields)
        self.state = State.LOADING
        self.health = Health(server, (NODE_SERVICE, *role.services))
        self.link = EngineClient(config, self.agent if role.uses_connector else "", posts)
        self.watch = LivenessWatch(self.link.pulse)
        self.watching = NodeReports(partial(describe, self))
        self.link.on_batch = self.watching.on_batch
        self.metrics = NodeMetrics(self)

    async def enter(self, state: State) -> None:
        """Be in ``state``, and have everybody know."""
        self.state = state
        self.watching.wake()
        await self.health.show(state)

    @property
    def agent(self) -> str:
        """The connector's name: another one after every restart, so that stale references cannot match."""
        return f"{self.node_id}-{self.epoch}"

    def check_ready(self) -> None:
        """Raise NodeError, or Draining, unless this node takes requests now."""
        if self.state is State.DRAINING:
            raise Draining(f"{self.role.name} node {self.node_id} is about to end; go to another one")
        if self.state is not State.READY:
            raise NodeError(f"{self.role.name} node {self.node_id} is {self.state}; try again when it is ready")


def role_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with all flags that both roles share."""
    parser = CommandParser(prog=prog, description=description)
    add_node_flags(parser)
    add_front_flags(parser)
    add_host_flags(parser)
    return parser


def run_role(parser: argparse.ArgumentParser, argv: Sequence[str] | None, make: Callable[..., Role]) -> int:
    """Run a node until it is stopped, or the ranks of it that this host has; ``make(args)`` builds its role.

    Returns the exit status.
    """

    def command() -> int:
        args = parser.parse_args(argv)
        role, front, options = make(args), front_options_from(args), options_from(args)
        host = hosted_from(args, options.num_ranks)
        setup_logging(role.name, front.log_format)
        watch_lifeline(front.lifeline_fd)
        status = StatusWriter(front.status_fd)
        try:
            if not host.leads:
                return run_ranks(options, host, status)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(role, options, host, front, status))
        except Exception as exc:
            status.failed(one_line(exc))
            raise
        return 0

    return run_command(command)


async def _serve(role: Role, options: NodeOptions, host: HostRanks, front: FrontOptions, status: StatusWriter) -> None:
    signals = ShutdownSignals()
    server = grpc.aio.server(options=rpc.server_options(PeerTiming(options.peer_timeout)))
    tls = None if options.grpc_tls is None else PeerTls(options.grpc_tls)
    metrics = _metrics_server(front)
    port = rpc.bind(server, front.host, front.port, tls)
    address = front.address(port)
    devices = node_devices(options, len(host.ranks))
    config = resolve(options, devices[0])
    for choice in config.choices:
        _log.info("%s", choice)
    _log.info("runner %s: %s", config.decision.runner, "; ".join(config.decision.reasons))
    node = Node(role, config, Posts(devices, host.leader), server, front.node_id or address, tls)
    set_process_fields(node=node.node_id)
    node.tracer, node.log_requests = make_tracer(front.traces, role.name, node.node_id), front.log_requests
    add_node_service(node)
    service = role.attach(node)
    async with _running(node, metrics):
        await node.enter(State.LOADING)
        await server.start()
        if metrics is not None:
            await metrics.start(node)
        status.listening(address)
        _log.info("node %s (epoch %s) listens on %s", node.node_id, node.epoch, address)
        if not await _unless(signals.stop, node.link, _start(node, status)):
            return
        await node.enter(State.READY)
        status.ready()
        _log.info("ready: %s, %s", config.served_model_name, _describe_cache(config, node.link.kv_layout))
        await _unless(signals.stop, node.link, _attend(node))
        await node.enter(State.DRAINING)
        _log.info("draining for %g s at most; a second signal ends this node at once", front.drain_timeout)
        if not await _unless(signals.hurry, node.link, _drain(node, service, front.drain_timeout)):
            service.hand_over(Draining("the node ends at once; send the request again"))


def _metrics_server(front: FrontOptions) -> MetricsServer | None:
    if front.metrics_port is None:
        return None
    from engine.frontend.metrics_server import MetricsServer  # imported here: uvicorn takes a tenth of a second

    return MetricsServer(front.host, front.metrics_port)


async def _start(node: Node, status: StatusWriter) -> None:
    def on_progress(progress: Progress) -> None:
        status.loading(progress.stage, progress.fraction)

    node.link.on_progress = on_progress
    started = time.monotonic()
    await node.link.start()
    _log.info("engine ready after %.1f s", time.monotonic() - started)
    await node.enter(State.CONNECTING)
    await node.role.connect()


async def _attend(node: Node) -> None:
    """Have everybody know, for ever, whether the engine answers."""

    async def on_change(trouble: str) -> None:
        if node.state is not State.DRAINING:
            await node.enter(State.STUCK if trouble else State.READY)
        if trouble:
            _log.error("%s: no requests are taken until it goes on", trouble)
            node.link.refuse_all(NodeError(f"{node.role.name} node {node.node_id}: {trouble}"))
        else:
            _log.warning("the engine goes on")

    await node.watch.run(on_change)


async def _drain(node: Node, service: Drained, seconds: float) -> None:
    """An engine that gets stuck meanwhile fails its requests, as it does at any time."""
    attending = asyncio.create_task(_attend(node), name="engine watch while draining")
    try:
        await drain(service, seconds)
    finally:
        attending.cancel()


@contextlib.asynccontextmanager
async def _running(node: Node, metrics: MetricsServer | None) -> AsyncIterator[None]:
    """Whatever happens inside, the server, the role and the engine are ended in this order, within 3 seconds."""
    try:
        yield
    finally:
        node.watching.end()
        await node.server.stop(_STOP_GRACE if node.state is State.DRAINING else 0)
        await node.role.close()
        await node.link.shutdown()
        if metrics is not None:
            metrics.close()
        node.tracer.close()


async def _unless(stop: asyncio.Event, link: EngineClient, work: object) -> bool:
    """Await ``work``; False when a signal came first. Raises EngineDied when the engine ends meanwhile."""
    job = asyncio.ensure_future(work)  # type: ignore[call-overload]
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([job, stopping, link.closed], return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            job.result()
            return True
        if link.closed.done():
            raise link.closed.result()
        return False
    finally:
        for task in (job, stopping):
            task.cancel()
        await asyncio.wait([job, stopping])


def _describe_cache(config: NodeConfig, layout: KVLayout) -> str:
    return (
        f"runner {config.decision.runner}, {layout.num_blocks} KV blocks of {layout.block_size} tokens "
        f"(kernel pages of {layout.kernel_block_size}), up to {config.max_model_len} tokens"
    )
