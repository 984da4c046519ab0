"""The gRPC services that every node has: Node (Describe, Status, Watch) and reflection; health is health.py."""

from __future__ import annotations

from contextlib import aclosing
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from engine.frontend.node_reports import sample_bits
from pdserve.metrics import flat
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.protobuf import layout_to_pb

if TYPE_CHECKING:
    from engine.frontend.node import Node

NODE_SERVICE = "pdserve.v1.Node"
VERSION = version("pdserve")

Context = grpc.aio.ServicerContext[Any, Any]


def describe(node: Node) -> pb.NodeDescription:
    """What a node is."""
    config, layout = node.config, node.link.kv_layout
    return pb.NodeDescription(
        node_id=node.node_id,
        epoch=node.epoch,
        role=node.role.name,
        state=node.state,
        model=config.served_model_name,
        version=VERSION,
        compat_hash=node.compat_hash,
        runner=config.decision.runner,
        runner_reasons=config.decision.reasons,
        kv_layout=layout_to_pb(config.whole_layout(layout)),
        max_model_len=config.max_model_len,
        vocab_size=config.model.vocab_size,
        connected_peers=node.role.connected_peers(),
        cache_sample_bits=sample_bits(layout.num_blocks),
    )


class NodeService(pb_grpc.NodeServicer):
    """Answers from what the front knows; the engine is never asked."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.NodeDescription:
        return describe(self._node)

    async def Watch(  # type: ignore[override]  # it writes to its context: a generator is not told of a broken stream
        self, request: pb.WatchRequest, context: Context
    ) -> None:
        async with aclosing(self._node.watching.reports(request.pause_ms / 1000)) as reports:
            async for report in reports:
                await context.write(report)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.NodeStatus:
        status = self._node.link.status
        return pb.NodeStatus(
            free_blocks=status.free,
            held_blocks=status.held,
            leased_blocks=status.leased,
            quarantined_blocks=status.quarantined,
            total_blocks=status.total,
            waiting=status.waiting,
            reading=status.reading,
            running=status.running,
            steps=status.totals.steps,
            counters=flat(self._node.metrics.collect()),
        )


def add_node_service(node: Node) -> None:
    pb_grpc.add_NodeServicer_to_server(NodeService(node), node.server)
    reflection.enable_server_reflection(
        (NODE_SERVICE, *node.role.services, health.SERVICE_NAME, reflection.SERVICE_NAME), node.server
    )
