"""A node's health for probes, over grpc.health.v1.

    service               serves while the node is                        Kubernetes probe
    live                  anything but stuck                              liveness: the step loop makes progress
    loaded                anything but loading                            startup: weights loaded, kernels compiled
    "" and its services   ready                                           readiness: it accepts requests

``live`` and ``loaded`` do not depend on other nodes: no node is restarted because a peer is gone.
"""

from __future__ import annotations

from enum import StrEnum

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

LIVE = "live"
LOADED = "loaded"


class NodeState(StrEnum):
    LOADING = "loading"
    CONNECTING = "connecting"
    READY = "ready"
    STUCK = "stuck"
    DRAINING = "draining"
    UNLOADED = "without weights"  # a reload has failed half-way
    ASLEEP = "asleep"  # the engine process has ended, until the node is woken


class Health:
    """Valid after the first ``show``."""

    def __init__(self, server: grpc.aio.Server, services: tuple[str, ...]) -> None:
        """``services`` accept requests, so they serve only while the node is ready."""
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._services = ("", *services)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def show(self, state: NodeState) -> None:
        await self._set(LIVE, state is not NodeState.STUCK)
        await self._set(LOADED, state is not NodeState.LOADING)
        for name in self._services:
            await self._set(name, state is NodeState.READY)

    async def _set(self, name: str, serves: bool) -> None:
        kinds = health_pb2.HealthCheckResponse
        await self._servicer.set(name, kinds.SERVING if serves else kinds.NOT_SERVING)
