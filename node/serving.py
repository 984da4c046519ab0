"""Runs a node: bind its ports, resolve its configuration, compose its parts, serve.

The ports are checked before anything is loaded, so that a port in use is found at once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import grpc

from node.context import NodeContext, Role, new_epoch
from node.drain import ShutdownSignals
from node.engine_client.client import EngineClient
from node.engine_client.launched_engine import LaunchedEngine
from node.frontend_flags import FrontendOptions
from node.images.service import attach_images
from node.metrics import exported_registry
from node.node import Node
from pdserve.config.device import node_devices
from pdserve.config.multi_host import LocalRanks
from pdserve.config.node_config import NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve
from pdserve.errors import ConfigError
from pdserve.host.process import StatusWriter
from pdserve.ipc.messages import RankPlacement
from pdserve.logs import set_process_fields
from pdserve.rpc import channel as rpc
from pdserve.rpc.message_limits import request_limit
from pdserve.rpc.tls import PeerTls
from pdserve.tracing.trace_flags import make_tracer

if TYPE_CHECKING:
    from pdserve.http.metrics_server import MetricsServer

_log = logging.getLogger(__name__)


async def serve(
    role: Role,
    options: NodeOptions,
    local: LocalRanks,
    frontend: FrontendOptions,
    status: StatusWriter,
    launched: LaunchedEngine,
) -> None:
    """Run a node, which takes over the engine process ``launched``, until it is stopped. Raises its last error."""
    signals = ShutdownSignals()
    rpc.check_port(frontend.host, frontend.port)
    tls = None if options.grpc_tls is None else PeerTls(options.grpc_tls)
    metrics_server = _metrics_server(frontend)
    devices = node_devices(options, len(local.ranks))
    config = resolve(options, devices[0], encodes=role.name != "decode")
    _check_task(config, role)
    limit = request_limit(config.max_model_len)
    server = grpc.aio.server(options=rpc.server_options(config.options.peer_timing, limit))
    address = frontend.address(rpc.bind(server, frontend.host, frontend.port, tls))
    _log_choices(config)
    node_id = frontend.node_id or address
    epoch = new_epoch()
    has_connector = role.uses_connector and config.pooling is None
    agent = f"{node_id}-{epoch}" if has_connector else ""  # stale references to an earlier epoch cannot match
    cache_listener = frontend.cache_listener(config, address)
    placement = RankPlacement(devices, local.leader, local.timeout)
    engine = EngineClient(config, agent, placement, launched, cache_changes=cache_listener.listens)
    tracer = make_tracer(frontend.traces, role.name, node_id)
    context = NodeContext(
        role=role.name,
        node_id=node_id,
        epoch=epoch,
        config=config,
        engine=engine,
        tls=tls,
        tracer=tracer,
        log_requests=frontend.log_requests,
    )
    attach_images(context, server, frontend.image_memory)
    set_process_fields(node=node_id)
    node = Node(
        role,
        context,
        server,
        status,
        address=address,
        weights_root=frontend.allow_weight_changes,
        cache_listener=cache_listener,
    )
    try:
        await node.start_server()
        if metrics_server is not None:
            await metrics_server.start(exported_registry(node.metrics, lambda: engine.pid))
        cache_listener.start()
        status.listening(address)
        _log.info("node %s (epoch %s) listens on %s", node_id, epoch, address)
        await node.run(signals, frontend.drain_timeout)
    finally:
        await node.close()
        cache_listener.close()
        if metrics_server is not None:
            metrics_server.close()
        tracer.close()


def _metrics_server(frontend: FrontendOptions) -> MetricsServer | None:
    """Bind the port for Prometheus, if there is one."""
    if frontend.metrics_port is None:
        return None
    from pdserve.http.metrics_server import MetricsServer  # imports uvicorn, which takes 0.1 s

    return MetricsServer(frontend.host, frontend.metrics_port)


def _check_task(config: NodeConfig, role: Role) -> None:
    """Raises ConfigError for a model that pools on a node that generates."""
    if config.pooling is not None and role.name != "prefill":
        task = f"task {config.pooling.task}: a node of role {role.name} generates"
        raise ConfigError(f"{task}, prefill nodes alone serve this model; start `pdserve prefill`")


def _log_choices(config: NodeConfig) -> None:
    for choice in config.choices:
        _log.info("%s", choice)
    decision = config.decision
    level = logging.WARNING if decision.fallback and config.device.kind == "cuda" else logging.INFO
    _log.log(level, "runner %s: %s", decision.runner, "; ".join(decision.reasons))
