"""``/metrics`` at a port of its own, for Prometheus, without authentication.

A thread renders the metrics: that takes 20 ms on a decode node with a thousand peers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from uvicorn.server import ServerState

from pdserve.http.connections import IDLE_SECONDS, BoundedConnection, ConnectionLimit, listen
from pdserve.rpc.address import join_address

_MAX_CONNECTIONS = 16

_log = logging.getLogger(__name__)


class MetricsServer:
    """Binds its port at construction, so that a port in use is found before the model loads."""

    def __init__(self, host: str, port: int) -> None:
        """Port 0 is any free one. Raises CapacityError when it cannot listen there."""
        self._socket = listen(host, port, "--metrics-port")
        self._server: asyncio.Server | None = None
        self._state = ServerState()

    async def start(self, registry: CollectorRegistry) -> None:
        """Serve until ``close``."""
        config = uvicorn.Config(
            _MetricsApp(registry),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            proxy_headers=False,
        )
        config.load()
        limit = ConnectionLimit(_MAX_CONNECTIONS)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: BoundedConnection(config=config, server_state=self._state, app_state={}, limit=limit),
            sock=self._socket,
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
        status = 404
        body = b"metrics are at /metrics\n"
        if scope["path"] == "/metrics":
            status = 200
            body = await asyncio.to_thread(generate_latest, self._registry)
        headers = [(b"content-type", CONTENT_TYPE_PLAIN_0_0_4.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
