"""A node's ``/metrics`` over HTTP, for Prometheus.

It runs on the frontend's event loop. A thread renders the metrics: that takes 20 ms on a decode node with a thousand
peers. The port needs no authentication: it serves the figures of ``Node.Status`` and the resource use of the processes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, MutableMapping
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from uvicorn.server import ServerState

from pdserve.rpc.address import join_address
from pdserve.rpc.http_connections import IDLE_SECONDS, BoundedConnection, listen

_MAX_SCRAPES = 16  # concurrent connections; further requests get a 503

_log = logging.getLogger(__name__)


class MetricsServer:
    """Binds its port at construction, so that a port in use is found before the model loads."""

    def __init__(self, host: str, port: int) -> None:
        """Port 0 is any free one. Raises CapacityError when it cannot listen there."""
        self._socket = listen(host, port, "--metrics-port")
        self._server: asyncio.Server | None = None
        self._state = ServerState()

    async def start(self, metrics: Collector, engine_pid: Callable[[], int | None]) -> None:
        """Serve ``metrics`` and the resource use of the frontend and engine processes, until ``close``."""
        registry = CollectorRegistry()
        registry.register(metrics)
        ProcessCollector(registry=registry)
        ProcessCollector(namespace="pdserve_engine", pid=lambda: str(engine_pid()), registry=registry)
        config = uvicorn.Config(
            _MetricsApp(registry),
            http=BoundedConnection,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            proxy_headers=False,
            limit_concurrency=_MAX_SCRAPES,
        )
        config.load()
        self._server = await asyncio.get_running_loop().create_server(
            lambda: BoundedConnection(config=config, server_state=self._state, app_state={}), sock=self._socket
        )
        _log.info("metrics at http://%s/metrics", join_address(*self._socket.getsockname()[:2]))

    def close(self) -> None:
        """Stop serving and abort open connections. Idempotent."""
        if self._server is not None:
            self._server.close()
        self._socket.close()
        for connection in list(self._state.connections):
            connection.transport.abort()


class _MetricsApp:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        status, body = 404, b"metrics are at /metrics\n"
        if scope["path"] == "/metrics":
            status, body = 200, await asyncio.to_thread(generate_latest, self._registry)
        headers = [(b"content-type", CONTENT_TYPE_PLAIN_0_0_4.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
