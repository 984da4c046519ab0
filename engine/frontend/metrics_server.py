"""A node's ``/metrics`` over HTTP, for Prometheus.

On the front's event loop; what is said is put together on a thread, since that takes 20 ms where a decode node has a
thousand peers. Whoever can reach the port is told no more than ``Node.Status`` tells, and what the processes use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import uvicorn
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from uvicorn.server import ServerState

from pdserve.rpc.address import join_address
from pdserve.rpc.http_connections import IDLE_SECONDS, BoundedConnection, listen

if TYPE_CHECKING:
    from engine.frontend.node import Node

_MAX_SCRAPES = 16  # connections at once; further requests get a 503

_log = logging.getLogger(__name__)


class MetricsServer:
    """Takes its port at once, so that a taken one is found before anything is loaded."""

    def __init__(self, host: str, port: int) -> None:
        """Port 0 is any free one. Raises CapacityError when it cannot listen there."""
        self._socket = listen(host, port, "--metrics-port")
        self._server: asyncio.Server | None = None
        self._state = ServerState()

    async def start(self, node: Node) -> None:
        """Serve ``node``'s metrics, and those of its two processes, until ``close``."""
        registry = CollectorRegistry()
        registry.register(node.metrics)
        ProcessCollector(registry=registry)
        ProcessCollector(namespace="pdserve_engine", pid=lambda: str(node.link.pid), registry=registry)
        config = uvicorn.Config(
            _Page(registry),
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
        _log.info("metrics are at http://%s/metrics", join_address(*self._socket.getsockname()[:2]))

    def close(self) -> None:
        """Scrapes that are under way end without an answer. Idempotent."""
        if self._server is not None:
            self._server.close()
        self._socket.close()
        for connection in list(self._state.connections):
            connection.transport.abort()


class _Page:
    """An ASGI application that has metrics at one path, and at others nothing."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        status, body = 404, b"metrics are at /metrics\n"
        if scope["path"] == "/metrics":
            status, body = 200, await asyncio.to_thread(generate_latest, self._registry)
        headers = [
            (b"content-type", CONTENT_TYPE_PLAIN_0_0_4.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
