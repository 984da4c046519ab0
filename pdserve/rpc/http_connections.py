"""Ports for HTTP, and connections with bounds that uvicorn does not have: how long a request may take to arrive, how
large its headers may be, and how long a client may leave its response unread.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdserve.errors import CapacityError
from pdserve.rpc.address import join_address

MAX_HEADER_BYTES = 64 * 1024  # of one request, its line and trailers included
HEADER_SECONDS = 20.0  # from connecting, or from a request's first byte, to the end of its headers
BODY_SECONDS = 65.0  # from there to the end of its body; the endpoints answer a little earlier
UNREAD_SECONDS = 60.0  # in which a client takes nothing of what was written to it
IDLE_SECONDS = 75  # between two requests: longer than clients and proxies wait, or one may send as we close

_BACKLOG = 2048  # connections that wait to be accepted
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_HANG_UP = "pdserve.hang_up"  # in the scope


def listen(host: str, port: int, flag: str) -> socket.socket:
    """A listening socket; port 0 is any free one. Raises CapacityError, which names the port's ``flag``, when the port
    is taken or the address is not of this machine.
    """
    address = join_address(host, port)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise CapacityError(f"port {port} on {host} is in use; choose another {flag}, or 0 for any") from exc
        raise CapacityError(f"cannot listen on {address}: {exc.strerror or exc}; check --host and {flag}") from exc


class BoundedConnection(HttpToolsProtocol):
    """What stays incomplete, or unread, for too long is ended without a word."""

    _arriving: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _header_bytes = 0  # that the parser has handed over, of this request
    _kept_bytes = 0  # that the parser may keep to itself: they came without anything else
    _advanced = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_within(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_within(None)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._advanced = False
        super().data_received(data)
        self._kept_bytes = 0 if self._advanced else self._kept_bytes + len(data)
        if max(self._kept_bytes, self._header_bytes) > MAX_HEADER_BYTES and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(_TOO_LARGE)
                self.transport.close()
            else:  # in trailers, or behind a request that is being answered
                self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[_HANG_UP] = self.transport.abort  # type: ignore[literal-required]
        self._header_bytes = 0
        self._expect_within(HEADER_SECONDS)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._header_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value)

    def on_headers_complete(self) -> None:
        self._advanced = True
        self._expect_within(BODY_SECONDS)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._advanced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._advanced = True
        self._expect_within(None)
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _expect_within(self, seconds: float | None) -> None:
        """Have the next part of a request by then; None: there is none to come."""
        if self._arriving is not None:
            self._arriving.cancel()
        self._arriving = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


def hang_up(scope: Any) -> None:
    """End the connection of a request at once, without waiting for the client to read what was written."""
    abort = scope.get(_HANG_UP)
    if abort is not None:
        abort()
