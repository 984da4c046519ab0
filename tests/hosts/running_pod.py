"""A running pod of a cluster (cluster.py), with the calls that tests make."""

from __future__ import annotations

import ssl
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import grpc
from certificates import tls_channel
from fleet import NodeCalls
from grpc_health.v1 import health_pb2, health_pb2_grpc
from overlays import Pod

from pdserve.rpc.tls import PeerTls


@dataclass
class RunningPod(NodeCalls):
    """A pod by its name, across restarts."""

    kind: Pod
    pod_name: str
    forwarded: str  # address at which pytest reaches the pod's port
    metrics: str  # address at which Prometheus' host reaches the pod's metrics
    log: Path
    tls: PeerTls | None  # None: the pod's port is without TLS
    program: subprocess.Popen[bytes] | None = None
    ready: bool = False  # in EndpointSlices

    @property
    def name(self) -> str:
        return self.pod_name

    @property
    def address(self) -> str:
        return self.forwarded

    @property
    def role(self) -> str:
        return self.kind.role

    def channel(self) -> grpc.Channel:
        if self.tls is None:
            return super().channel()
        return tls_channel(self.forwarded, self.tls.channel_credentials())

    def serves(self) -> bool:
        """Return the result of the readiness probe; Kubernetes does not verify certificates."""
        try:
            if self.role == "router":
                url = f"{'http' if self.tls is None else 'https'}://{self.forwarded}/health"
                with urllib.request.urlopen(url, timeout=2.0, context=ssl._create_unverified_context()):
                    return True
            with self.channel() as channel:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2.0)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        except (OSError, grpc.RpcError):
            return False
