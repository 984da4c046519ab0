"""A pod of a cluster on hosts (cluster.py), as tests see it."""

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
    """A pod by its name, in whichever life."""

    kind: Pod
    pod_name: str
    door: str  # where pytest reaches its port
    metrics: str  # and its metrics, by Prometheus' way
    log: Path
    tls: PeerTls | None  # where it wants to be spoken to by it
    program: subprocess.Popen[bytes] | None = None
    ready: bool = False  # as EndpointSlices say

    @property
    def name(self) -> str:
        return self.pod_name

    @property
    def address(self) -> str:
        return self.door

    @property
    def role(self) -> str:
        return self.kind.role

    def channel(self) -> grpc.Channel:
        if self.tls is None:
            return super().channel()
        return tls_channel(self.door, self.tls.channel_credentials())

    def serves(self) -> bool:
        """What its readiness probe says; Kubernetes does not look at certificates."""
        try:
            if self.role == "router":
                url = f"{'http' if self.tls is None else 'https'}://{self.door}/health"
                with urllib.request.urlopen(url, timeout=2.0, context=ssl._create_unverified_context()):
                    return True
            with self.channel() as channel:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2.0)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        except (OSError, grpc.RpcError):
            return False
