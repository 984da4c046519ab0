"""Node identity, state and engine client, for the gRPC services and roles of the node."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc
from prometheus_client.metrics_core import Metric

from node.drain import Drainable
from node.engine_client.client import EngineClient
from node.health import NodeState
from node.image_uploads import NO_UPLOADS, ImageUploads
from node.streams.served_streams import Violations
from pdserve.adapters.adapter import NamedAdapter
from pdserve.config.compatibility import compat_hash, weights_version
from pdserve.config.node_config import NodeConfig
from pdserve.errors import Draining, NodeError
from pdserve.ipc.messages import UseWeights
from pdserve.rpc.tls import PeerTls
from pdserve.tracing.spans import Tracer


def new_epoch() -> str:
    return secrets.token_hex(8)


@dataclass
class NodeContext:
    """One node from start to exit. A restart draws a new epoch, and so do a wake-up and a change of the weights."""

    role: str  # "prefill", "decode" or "both"
    node_id: str
    epoch: str
    config: NodeConfig
    engine: EngineClient
    tls: PeerTls | None  # credentials for calls to other nodes
    tracer: Tracer
    log_requests: bool
    state: NodeState = NodeState.LOADING
    violations: Violations = field(default_factory=Violations)
    weight_changes: dict[str, int] = field(default_factory=lambda: {"done": 0, "refused": 0, "failed": 0})
    compat_hash: str = ""  # empty until the digests of the weights are known
    images: ImageUploads = NO_UPLOADS
    adapters: tuple[NamedAdapter, ...] = ()  # written by NodeAdapters

    def set_config(self, config: NodeConfig) -> None:
        """Use a configuration whose ``compat_fields`` are complete."""
        self.config = config
        self.compat_hash = compat_hash(config.compat_fields)
        self.engine.send(UseWeights(config.kv_version))

    def begin_epoch(self, config: NodeConfig) -> None:
        """Be a new node for peers and routers, with the weights of ``config``."""
        self.set_config(config)
        self.epoch = new_epoch()
        self.images.clear()

    @property
    def weights(self) -> str:
        """Short name of the weights: equal for nodes with equal weights; empty until their digests are known."""
        return weights_version(self.config.compat_fields) if self.compat_hash else ""

    @property
    def name(self) -> str:
        """Role and id, for errors and logs."""
        return f"{self.role} node {self.node_id}"

    def check_ready(self) -> None:
        """Raise NodeError, or Draining, unless this node accepts requests now."""
        if self.state is NodeState.DRAINING:
            raise Draining(f"{self.name} is shutting down; send the request to another node")
        if self.state is not NodeState.READY:
            raise NodeError(f"{self.name} is {self.state}; try again when it is ready")


class Role(Protocol):
    """The part of a node that differs between prefill and decode."""

    name: str  # "prefill", "decode" or "both"
    services: tuple[str, ...]  # full names of its gRPC services
    uses_connector: bool
    hands_off_all: bool  # prompts of any length

    @property
    def leases_cache(self) -> bool:
        """Whether other nodes may read its prefix cache."""

    def attach(self, node: NodeContext, server: grpc.aio.Server) -> Drainable:
        """Register servicers at ``server`` and callbacks at ``node.engine``, before the engine starts.

        Returns the service to drain before the node exits.
        """

    async def connect(self) -> None:
        """Connect to peers, within a bound. The engine is ready; the node becomes ready afterwards."""

    def drop_peers(self, reason: str) -> None:
        """End all handoffs and leases at once. Connect again when the node is ready, to peers with its weights."""

    def connected_peers(self) -> Sequence[str]:
        """Ids of the nodes that KV can be read from."""

    def metrics(self) -> Iterable[Metric]:
        """Metrics that only this role has."""

    async def close(self) -> None:
        """End tasks and channels. Idempotent."""
