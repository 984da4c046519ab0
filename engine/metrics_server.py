"""A node's ``/metrics`` over HTTP, for Prometheus, on the front's event loop: a scrape keeps it for some milliseconds.

It says no more than ``Node.Status`` does, to whoever can reach the port: have a network policy say who that is.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import uvicorn
from prometheus_client import CollectorRegistry, ProcessCollector, make_asgi_app
from uvicorn.server import ServerState

from pdserve.address import join_address
from pdserve.connections import BoundedConnection
from pdserve.errors import CapacityError

if TYPE_CHECKING:
    from engine.node import Node

_MAX_SCRAPES = 16  # connections at once; further requests get a 503
_NOT_FOUND = b"metrics are at /metrics\n"

_log = logging.getLogger(__name__)


class MetricsServer:
    """Takes its port at once, so that a taken one is found before anything is loaded."""

    def __init__(self, host: str, port: int) -> None:
        """Port 0 is any free one. Raises CapacityError when it cannot listen there."""
        self._socket = _bind(host, port)
        self._server: asyncio.Server | None = None
        self._state = ServerState()

    async def start(self, node: Node) -> None:
        """Serve ``node``'s metrics, and those of its two processes, until ``close``."""
        registry = CollectorRegistry()
        registry.register(node.metrics)
        ProcessCollector(registry=registry)
        ProcessCollector(namespace="pdserve_engine", pid=lambda: str(node.link.pid), registry=registry)
        config = uvicorn.Config(
            _At("/metrics", make_asgi_app(registry, disable_compression=True)),
            http=BoundedConnection,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
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


class _At:
    """An ASGI application at one path; at others there is nothing."""

    def __init__(self, path: str, app: Any) -> None:
        self._path = path
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["path"] == self._path:
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(_NOT_FOUND)).encode())]
        await send({"type": "http.response.start", "status": 404, "headers": headers})
        await send({"type": "http.response.body", "body": _NOT_FOUND})


def _bind(host: str, port: int) -> socket.socket:
    address = join_address(host, port)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise CapacityError(f"{address} is in use; choose another --metrics-port, or 0 for any") from exc
        raise CapacityError(f"cannot listen on {address}: {exc.strerror or exc}; check --metrics-port") from exc
