"""A pod of a cluster on hosts (cluster.py), as tests see it."""

from __future__ import annotations

import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import grpc
from fleet import NodeCalls
from grpc_health.v1 import health_pb2, health_pb2_grpc
from overlays import Pod


@dataclass
class RunningPod(NodeCalls):
    """A pod by its name, in whichever life."""

    kind: Pod
    pod_name: str
    door: str  # where pytest reaches its port
    metrics: str  # and its metrics, by Prometheus' way
    log: Path
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

    def serves(self) -> bool:
        """What its readiness probe says."""
        try:
            if self.role == "router":
                with urllib.request.urlopen(f"http://{self.door}/health", timeout=2.0):
                    return True
            with grpc.insecure_channel(self.door) as channel:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2.0)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        except (OSError, grpc.RpcError):
            return False
