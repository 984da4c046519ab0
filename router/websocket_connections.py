"""WebSocket connections with the limits of pdserve/http/connections.py: number of connections, memory and time of
messages, and time without reading the answers.

idle ── message complete ──► busy ── the application's ``set_idle`` ──► idle        ConnectionLimit may close idle ones
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

from pdserve.http.connections import ABORT, BODY_SECONDS, ConnectionLimit, UnreadWatch

_MAX_FRAGMENTS = 4096  # fragments per message
_SMALL_BYTES = 64 * 1024  # bytes that a connection may always hold
_MESSAGE_BYTES = 512  # bytes counted per message beside its content: an empty message takes memory, too
_BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_SET_IDLE = "pdserve.set_idle"  # key in the ASGI scope
# close codes of RFC 6455
_TOO_BIG = 1009
_TRY_AGAIN_LATER = 1013


class MessageMemory:
    """Bytes of messages that the application has not taken, over all connections."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self.num_bytes = 0


class WebSocketConnection(UnreadWatch, WebSocketsSansIOProtocol):
    """Close a connection whose message is too large, or stays incomplete for BODY_SECONDS."""

    _deadline: asyncio.TimerHandle | None = None  # timer while a message is incomplete
    _held = 0  # bytes in MessageMemory
    _complete = 0  # bytes of complete messages, until the application wants the message after them
    _taken = 0  # bytes of the message that the application has
    _pong: Sequence[bytes] = ()  # newest pong that waits until the client reads

    def __init__(
        self,
        *args: Any,
        limit: ConnectionLimit,
        memory: MessageMemory,
        stall_timeout: float,
        on_stall: Callable[[], object],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limit = limit
        self._memory = memory
        self._stall_timeout = stall_timeout
        self._on_stall = on_stall

    def abort(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.closed(self)
        self._on_room()
        self._complete = self._taken = 0
        self._hold(0)
        super().connection_lost(exc)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            scope: Any = self.scope
            scope[ABORT] = self.transport.abort
            scope[_SET_IDLE] = lambda: self._limit.idle(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self._refuse_handshake()
            return
        incomplete = len(self.conn.reader.buffer) + sum(map(len, self.frames))
        self._hold(incomplete)
        if len(self.frames) > _MAX_FRAGMENTS:
            self._refuse(_TOO_BIG, f"a message may have {_MAX_FRAGMENTS} fragments")
        elif self._memory.num_bytes > self._memory.maximum and self._held > _SMALL_BYTES:
            self._refuse(_TRY_AGAIN_LATER, "unfinished messages hold all of their memory")

    def send_receive_event_to_app(self) -> None:
        self.curr_msg_data_type = "bytes"  # the application decodes text and reports errors in it
        self._complete += sum(map(len, self.frames)) + _MESSAGE_BYTES
        self._limit.busy(self)
        super().send_receive_event_to_app()

    async def receive(self) -> Any:
        incomplete = self._held - self._complete
        self._complete -= min(self._taken, self._complete)
        self._hold(incomplete)
        message: Any = await super().receive()
        is_message = message["type"] == "websocket.receive"
        self._taken = len(message["bytes"]) + _MESSAGE_BYTES if is_message else 0
        self._hold(self._held - self._complete)  # reading may have resumed
        return message

    async def run_asgi(self) -> None:
        await super().run_asgi()
        self._limit.idle(self)  # an idle connection closes once the client has read the rest

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self._pong = self.conn.data_to_send()

    def _on_room(self) -> None:
        super()._on_room()
        pong = self._pong
        self._pong = ()
        if pong and not self.transport.is_closing():
            self.transport.write(b"".join(pong))

    def _hold(self, incomplete: int) -> None:
        held = incomplete + self._complete
        self._memory.num_bytes += held - self._held
        self._held = held
        self._set_deadline(incomplete > 0 and not self.read_paused)

    def _refuse_handshake(self) -> None:
        """Respond to headers that the package websockets does not parse; uvicorn ignores them."""
        self.handshake_complete = self.close_sent = True
        self.transport.write(b"".join(self.conn.data_to_send()) or _BAD_REQUEST)
        self.transport.close()

    def _refuse(self, code: int, reason: str) -> None:
        if not self.transport.is_closing() and not self.close_sent:
            self.conn.fail(code, reason)
            self.handle_parser_exception()

    def _set_deadline(self, incomplete: bool) -> None:
        if self._deadline is not None and not incomplete:
            self._deadline.cancel()
            self._deadline = None
        elif self._deadline is None and incomplete:
            self._deadline = self.loop.call_later(BODY_SECONDS, self.abort)


def set_idle(scope: Any) -> None:
    """The answer to a message is complete: the connection may be closed in favour of a new one."""
    scope[_SET_IDLE]()
