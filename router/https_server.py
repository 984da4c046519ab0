"""A listening socket for HTTPS whose connections count towards a ``ConnectionLimit`` from the moment of ``accept``.

uvloop's own server makes a connection known only at the end of its TLS handshake.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from pdserve.http.connections import BoundedConnection

_ACCEPTS = 16  # connections in one turn of the event loop
_RETRY_SECONDS = 0.1  # after an error of accept, such as too many open files

_log = logging.getLogger(__name__)


class HttpsServer:
    """Accepts connections until ``close``; has the methods of an asyncio server that uvicorn calls."""

    def __init__(
        self, listener: socket.socket, context: ssl.SSLContext, make_connection: Callable[[], BoundedConnection]
    ) -> None:
        """Call it on the event loop."""
        self._listener = listener
        self._context = context
        self._make_connection = make_connection
        self._loop = asyncio.get_running_loop()
        self._shaking: dict[asyncio.Task[None], BoundedConnection] = {}
        self._retry: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept no more, and abort unfinished handshakes. Idempotent."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)
        for connection in self._shaking.values():
            connection.abort()

    async def wait_closed(self) -> None:
        """Connections end on their own."""

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as exc:
                _log.warning("cannot accept a connection: %s", exc.strerror)
                self._loop.remove_reader(self._listener)
                self._retry = self._loop.call_later(_RETRY_SECONDS, self._listen)
                return
            accepted.setblocking(False)
            connection = self._make_connection()
            connection.accepted(accepted)
            task = self._loop.create_task(self._shake_hands(connection, accepted))
            self._shaking[task] = connection
            task.add_done_callback(self._shaking.pop)

    async def _shake_hands(self, connection: BoundedConnection, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, accepted, ssl=self._context)
        except OSError as exc:  # TLS errors, too
            _log.debug("a TLS handshake failed: %s", exc)
        finally:
            connection.handshake_ended()
