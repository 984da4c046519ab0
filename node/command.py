"""The command line of a node: parse flags, bind ports, then run the node, or the ranks that this host adds to one.

The ports are checked before anything is loaded, so that a port in use is found at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc
import uvloop

from node.context import NodeContext, Role, new_epoch
from node.drain import ShutdownSignals
from node.engine_client import EngineClient
from node.frontend_flags import FrontendOptions
from node.metrics import exported_registry
from node.node import Node
from pdserve.config.device import node_devices
from pdserve.config.multi_host import LocalRanks, add_host_flags, local_ranks_from
from pdserve.config.node_options import NodeOptions, add_node_flags, node_options_from
from pdserve.config.resolve import resolve
from pdserve.errors import ConfigError
from pdserve.flags.declaration import add_flags, options_from
from pdserve.flags.parser import CommandParser, command_parser
from pdserve.ipc.messages import RankPlacement
from pdserve.logs import set_process_fields, setup_logging
from pdserve.process import StatusWriter, run_command, watch_lifeline
from pdserve.rpc import channel as rpc
from pdserve.rpc.message_limits import request_limit
from pdserve.rpc.tls import PeerTls
from pdserve.tracing.trace_flags import make_tracer

_log = logging.getLogger(__name__)


def role_parser(prog: str, description: str) -> CommandParser:
    parser = command_parser(prog, description)
    add_node_flags(parser)
    add_flags(parser, FrontendOptions)
    add_host_flags(parser)
    return parser


def run_role(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    make: Callable[..., Role],
    run_ranks: Callable[[NodeOptions, LocalRanks, StatusWriter], int],
) -> int:
    """Run a node, or this host's ranks of it, until it is stopped; return the exit status.

    ``make(args)`` builds the node's role. ``run_ranks`` runs the ranks of a host without a frontend.
    """

    def command() -> int:
        args = parser.parse_args(argv)
        role, frontend, options = make(args), options_from(FrontendOptions, args), node_options_from(args)
        local = local_ranks_from(args, options.num_ranks)
        setup_logging(role.name, frontend.log_format, frontend.log_level)
        watch_lifeline(frontend.lifeline_fd)
        status = StatusWriter(frontend.status_fd)
        try:
            if not local.has_leader:
                return run_ranks(options, local, status)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(role, options, local, frontend, status))
        except Exception as exc:
            status.failed(exc)
            raise
        return 0

    return run_command(command)


async def _serve(
    role: Role, options: NodeOptions, local: LocalRanks, frontend: FrontendOptions, status: StatusWriter
) -> None:
    signals = ShutdownSignals()
    rpc.check_port(frontend.host, frontend.port)
    tls = None if options.grpc_tls is None else PeerTls(options.grpc_tls)
    metrics_server = None
    if frontend.metrics_port is not None:
        from pdserve.http.metrics_server import MetricsServer  # imports uvicorn, which takes 0.1 s

        metrics_server = MetricsServer(frontend.host, frontend.metrics_port)
    devices = node_devices(options, len(local.ranks))
    config = resolve(options, devices[0])
    if config.pooling is not None and role.name != "prefill":
        task = f"task {config.pooling.task}: a node of role {role.name} generates"
        raise ConfigError(f"{task}, prefill nodes alone serve this model; start `pdserve prefill`")
    limit = request_limit(config.max_model_len)
    server = grpc.aio.server(options=rpc.server_options(config.peer_timing, limit))
    address = frontend.address(rpc.bind(server, frontend.host, frontend.port, tls))
    for choice in config.choices:
        _log.info("%s", choice)
    level = logging.WARNING if config.decision.fallback and config.device.kind == "cuda" else logging.INFO
    _log.log(level, "runner %s: %s", config.decision.runner, "; ".join(config.decision.reasons))
    node_id, epoch = frontend.node_id or address, new_epoch()
    has_connector = role.uses_connector and config.pooling is None
    agent = f"{node_id}-{epoch}" if has_connector else ""  # stale references to an earlier epoch cannot match
    kv_events = None
    if (events := frontend.kv_events(f"kv@{address}@{config.served_model_name}")) is not None:
        from node.kv_events import KVEventPublisher, group_kinds  # imports ZeroMQ

        kv_events = KVEventPublisher(
            events, group_kinds(config.kv_layout, config.model.state is not None), config.kv_layout.block_size
        )
    placement = RankPlacement(devices, local.leader, local.timeout)
    engine = EngineClient(config, agent, placement, kv_events=kv_events is not None)
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
    set_process_fields(node=node_id)
    node = Node(
        role,
        context,
        server,
        status,
        address=address,
        weights_root=frontend.allow_weight_changes,
        kv_events=kv_events,
    )
    try:
        await node.start_server()
        if metrics_server is not None:
            await metrics_server.start(exported_registry(node.metrics, lambda: engine.pid))
        if kv_events is not None:
            kv_events.start()
        status.listening(address)
        _log.info("node %s (epoch %s) listens on %s", node_id, epoch, address)
        await node.run(signals, frontend.drain_timeout)
    finally:
        await node.close()
        if kv_events is not None:
            kv_events.close()
        if metrics_server is not None:
            metrics_server.close()
        tracer.close()
