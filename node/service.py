"""The gRPC services of every node: Node (Describe, Status, Watch) and reflection. Health is in health.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection
from msgspec.structs import asdict
from prometheus_client.registry import Collector

from node.context import NodeContext, Role
from node.reports import NodeReports, sample_bits
from pdserve import __version__
from pdserve.config.compatibility import PROTOCOL_VERSION
from pdserve.images import ImageMode
from pdserve.ipc.messages import Status
from pdserve.metrics import flat
from pdserve.model.pooling import GENERATE, YES_OR_NO
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.protobuf import image_input_to_pb, layout_to_pb

NODE_SERVICE = "pdserve.v1.Node"

Context = grpc.aio.ServicerContext[Any, Any]


def describe(node: NodeContext, role: Role) -> pb.NodeDescription:
    config = node.config
    layout = node.engine.kv_layout
    pooling = config.pooling
    accepted = node.images.accepted
    continued = config.image_input if config.images is ImageMode.POSITIONS else None
    return pb.NodeDescription(
        node_id=node.node_id,
        epoch=node.epoch,
        role=node.role,
        state=node.state,
        model=config.served_model_name,
        version=__version__,
        protocol=PROTOCOL_VERSION,
        compat_hash=node.compat_hash,
        runner=node.engine.decision.runner,
        runner_reasons=node.engine.decision.reasons,
        kv_layout=layout_to_pb(config.whole_layout(layout)),
        max_model_len=config.max_model_len,
        vocab_size=config.model.vocab_size,
        connected_peers=role.connected_peers(),
        stalled=node.engine.stalled,
        cache_sample_bits=sample_bits(layout.num_blocks),
        hands_off_all=role.hands_off_all,
        leases_cache=role.leases_cache,
        weights=node.weights,
        task=GENERATE if pooling is None else pooling.task,
        pooling=None
        if pooling is None
        else pb.Pooling(size=pooling.size, matryoshka=pooling.matryoshka, yes_or_no=pooling.method == YES_OR_NO),
        adapters=[pb.NamedAdapter(**asdict(adapter)) for adapter in node.adapters],
        images=None if accepted is None else image_input_to_pb(accepted),
        image_cost=None if accepted is None else pb.ImageCost(**asdict(config.image_token_cost)),
        continued_images=None if continued is None else image_input_to_pb(continued),
    )


class NodeService(pb_grpc.NodeServicer):
    """Answers from the frontend's state, without a round trip to the engine."""

    def __init__(self, reports: NodeReports, status: Callable[[], Status], metrics: Collector) -> None:
        self._reports = reports
        self._status = status
        self._metrics = metrics

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.NodeDescription:
        return self._reports.describe()

    async def Watch(  # type: ignore[override]  # it writes to its context: a generator does not see a broken stream
        self, request: pb.WatchRequest, context: Context
    ) -> None:
        async with aclosing(self._reports.subscribe(request.pause_ms / 1000)) as reports:
            async for report in reports:
                await context.write(report)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.NodeStatus:
        status = self._status()
        return pb.NodeStatus(
            free_blocks=status.free,
            held_blocks=status.held,
            leased_blocks=status.leased,
            quarantined_blocks=status.quarantined,
            total_blocks=status.total,
            waiting=status.waiting,
            reading=status.reading,
            running=status.running,
            paused=status.paused,
            steps=status.totals.steps,
            counters=flat(self._metrics.collect()),
        )


def add_node_service(server: grpc.aio.Server, service: NodeService, role_services: Sequence[str]) -> None:
    """Register the Node service, and reflection for all services of the server."""
    pb_grpc.add_NodeServicer_to_server(service, server)
    names = (NODE_SERVICE, *role_services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
