"""Listening sockets for HTTP, and connections with limits that uvicorn lacks: number of connections, arrival time of a
request, size of its headers, and time without reading the response.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pdserve.errors import CapacityError
from pdserve.http.request_parser import RequestParser, may_open_websocket, names_host
from pdserve.logs import LimitedWarnings
from pdserve.rpc.address import join_address

logging.getLogger("uvicorn.error").addFilter(LimitedWarnings())  # uvicorn warns of each malformed request

MAX_HEADER_BYTES = 64 * 1024  # per request, with request line and trailers
HEADER_SECONDS = 20.0  # seconds from connection or first byte to the end of a request's headers
BODY_SECONDS = 65.0  # seconds from there to the end of the body; endpoints respond with 504 a little earlier
UNREAD_SECONDS = 60.0  # seconds in which the client reads nothing of its response
IDLE_SECONDS = 700  # seconds between requests: above proxies' 650 s, so that none sends while this side closes
LAST_GRACE_SECONDS = 20.0  # beyond the time without reading, from the end of a response until the client has read it
_IDLE_GRACE = 5.0  # seconds until a connection is aborted that was closed as idle
# An interim response: a client that only shut its sending side skips it, a closed one refuses it.
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PROBE_SECONDS = (0.2, 5.0)  # seconds between the first two probes, and between later ones

# Unread bytes in the connection, and in the kernel. Beyond them the writer of a response waits, over TLS and without.
BUFFER_BYTES = _UNSENT_BYTES = 64 * 1024
_BACKLOG = 2048  # connections
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
ABORT = "pdserve.abort"  # key in the ASGI scope
_MAX_FILES = 65_536  # the limit of open files is raised to at most this
_RETRY_SECONDS = b"1"
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"


def listen(host: str, port: int, flag: str) -> socket.socket:
    """Open a listening socket; port 0 is any free port. Raises CapacityError that names ``flag``."""
    address = join_address(host, port)
    try:
        family = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0][0]
        dual = host in ("::", "[::]")  # IPv4, too
        where = (host.strip("[]"), port)
        listener = socket.create_server(where, family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)  # connections inherit it
        return listener
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise CapacityError(f"port {port} on {host} is in use; choose another {flag}, or 0 for any") from exc
        raise CapacityError(f"cannot listen on {address}: {exc.strerror or exc}; check --host and {flag}") from exc


def raise_file_limit() -> int:
    """Raise the soft limit of open files towards the hard one; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MAX_FILES if soft == resource.RLIM_INFINITY else soft


class Connection(Protocol):
    def abort(self) -> None:
        """Close the connection at once, with unread data."""


class ConnectionLimit:
    """Closes the longest idle connection beyond ``maximum``. If none is idle, the next request gets a 503.

    accepted ──► idle ◄─────────────┐        idle: in its TLS handshake, without a request whose headers are complete,
                  │ └── headers arrived ──► busy ── response complete             or about to close
                  └── evicted                 └── 503, while there are more than ``maximum``
    """

    def __init__(
        self, maximum: int, on_evict: Callable[[], None] = lambda: None, on_refuse: Callable[[], None] = lambda: None
    ) -> None:
        self.maximum = maximum
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # the longest idle first
        self._on_evict = on_evict
        self._on_refuse = on_refuse

    @property
    def num_open(self) -> int:
        return len(self._open)

    def opened(self, connection: Connection) -> None:
        self._open.add(connection)
        self.idle(connection)
        if self.num_open > self.maximum and (longest := next(iter(self._idle))) is not connection:
            self.closed(longest)
            longest.abort()
            self._on_evict()

    def closed(self, connection: Connection) -> None:
        """Idempotent."""
        self._open.discard(connection)
        self.busy(connection)

    def idle(self, connection: Connection) -> None:
        if connection in self._open:
            self._idle[connection] = None

    def busy(self, connection: Connection) -> None:
        self._idle.pop(connection, None)

    def refuses(self) -> bool:
        """Return whether a request that has arrived gets a 503."""
        refused = self.num_open > self.maximum
        if refused:
            self._on_refuse()
        return refused


class GatheringTransport(asyncio.Transport):
    """Gathers writes while the kernel's buffer is full, and writes them in one piece when it has room.

    A write that waits in the event loop takes 740 bytes beside its own, so a few hundred tokens would take 200 KiB.
    """

    def __init__(self, inner: asyncio.Transport, on_full: Callable[[], None], on_room: Callable[[], None]) -> None:
        """``on_full`` and ``on_room`` are called when more than BUFFER_BYTES wait, and when no more do."""
        super().__init__()
        inner.set_write_buffer_limits(1)  # 0 would pause a TLS transport of uvloop for ever
        self._inner = inner
        self._on_full = on_full
        self._on_room = on_room
        self._gathers = inner.get_write_buffer_size() > 1  # another protocol has left it unread
        self._waiting = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._gathers:
            self._waiting += data
            self._check()
        else:
            self._inner.write(data)

    def gather(self) -> None:
        """The kernel takes no more."""
        self._gathers = True
        self._check()

    def release(self) -> None:
        """The kernel has taken all of it."""
        self._gathers = False
        self._flush()
        if self.get_write_buffer_size() <= BUFFER_BYTES:
            self._on_room()

    def unwrap(self) -> asyncio.Transport:
        """Return the transport for another protocol."""
        self._flush()
        return self._inner

    def close(self) -> None:
        self._flush()
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()

    def is_closing(self) -> bool:
        return self._inner.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._inner.get_write_buffer_size() + len(self._waiting)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()

    def _flush(self) -> None:
        waiting = self._waiting
        self._waiting = bytearray()
        if waiting and not self._inner.is_closing():
            self._inner.write(bytes(waiting))

    def _check(self) -> None:
        if self.get_write_buffer_size() > BUFFER_BYTES:
            self._on_full()


class UnreadWatch:
    """Part of a connection: gather unread bytes, and abort it if they stay unread for ``_stall_timeout`` seconds.

    The protocol behind it learns that writing is paused once more than BUFFER_BYTES wait.
    """

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    _gathering: GatheringTransport | None = None
    _stall_timeout: float
    _on_stall: Callable[[], object]
    _unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._gathering = GatheringTransport(transport, on_full=self._on_full, on_room=self._on_room)
        super().connection_made(self._gathering)  # type: ignore[misc]

    def pause_writing(self) -> None:
        """Called by the event loop."""
        assert self._gathering is not None
        self._gathering.gather()

    def resume_writing(self) -> None:
        """Called by the event loop."""
        assert self._gathering is not None
        self._gathering.release()

    def _on_full(self) -> None:
        super().pause_writing()  # type: ignore[misc]
        if self._unread_timer is None:
            self._watch_reads(self.transport.get_write_buffer_size(), self.loop.time())

    def _on_room(self) -> None:
        super().resume_writing()  # type: ignore[misc]
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _watch_reads(self, unread: int, since: float) -> None:
        """``unread`` bytes have been left since then; the response adds none while writing is paused."""
        left = self.transport.get_write_buffer_size()
        now = self.loop.time()
        if left < unread:
            since = now
        if now >= since + self._stall_timeout:
            self._on_stall()
            self.transport.abort()
        else:
            self._unread_timer = self.loop.call_later(self._stall_timeout / 4, self._watch_reads, left, since)


class BoundedConnection(UnreadWatch, HttpToolsProtocol):
    """Abort a connection whose request stays incomplete, or whose response stays unread, for too long."""

    _shaking: socket.socket | None = None  # during the TLS handshake
    _arrival_timer: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None  # pipelined requests wait behind it
    _header_bytes = 0  # bytes of the request's headers that the parser has delivered
    _buffered_bytes = 0  # received without a parser event, so the parser may buffer them
    _progressed = False
    _half_closed = False  # the client has shut its sending side
    _probe_timer: asyncio.TimerHandle | None = None

    def __init__(
        self,
        *args: Any,
        limit: ConnectionLimit,
        stall_timeout: float = UNREAD_SECONDS,
        on_stall: Callable[[], object] = lambda: None,
        **kwargs: Any,
    ) -> None:
        """Abort a connection whose client reads nothing for ``stall_timeout`` seconds, and call ``on_stall``."""
        super().__init__(*args, **kwargs)
        self.parser = RequestParser(self)  # type: ignore[assignment]
        self._limit = limit
        self._stall_timeout = stall_timeout
        self._last_seconds = stall_timeout + LAST_GRACE_SECONDS
        self._on_stall = on_stall

    def accepted(self, shaking: socket.socket) -> None:
        """Count while the TLS handshake goes on, which is part of the time for the headers of a request."""
        self._shaking = shaking
        self._limit.opened(self)
        self._set_deadline(HEADER_SECONDS)

    def handshake_ended(self) -> None:
        self._shaking = None
        if self.transport is None:
            self._limit.closed(self)
            self._set_deadline(None)

    def abort(self) -> None:
        """Close the connection at once, with unread data."""
        if self.transport is not None:
            self.transport.abort()
        elif self._shaking is not None:
            with suppress(OSError):  # the client has closed the connection
                self._shaking.shutdown(socket.SHUT_RDWR)  # the handshake fails

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._shaking is None:
            self._limit.opened(self)
            self._set_deadline(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.closed(self)
        if self._running is not None and not self._running.response_complete:  # uvicorn tells the newest request only
            self._running.disconnected = True
            self._running.message_event.set()
        self._set_deadline(None)
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._on_room()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._progressed = False
        super().data_received(data)
        self._buffered_bytes = 0 if self._progressed else self._buffered_bytes + len(data)
        if max(self._buffered_bytes, self._header_bytes) > MAX_HEADER_BYTES and not self.transport.is_closing():
            if self._responding:  # in trailers, or behind a request in progress
                self.transport.abort()
            else:
                self.transport.write(_TOO_LARGE)
                self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if self._responding and (self._running is not self.cycle or self.cycle.response_started):
            self.transport.abort()  # the 400 would be part of another response
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]
        self._header_bytes = 0
        self._set_deadline(HEADER_SECONDS)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._header_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value)

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("this server is no proxy")  # a 400: the bytes behind it are of another protocol
        if not names_host(self.parser.get_http_version(), self.headers):
            raise ValueError("a request has one Host field")  # a 400: proxies may take it for another host's
        if self.parser.should_upgrade() and not self._should_upgrade():
            return  # the request is parsed again
        self._progressed = True
        self._set_deadline(BODY_SECONDS)
        self._limit.busy(self)
        self.app = _respond_busy if self._limit.refuses() else self.config.loaded_app
        super().on_headers_complete()

    def _should_upgrade(self) -> bool:
        """Return whether the request opens a WebSocket; its response would mix with another one in progress."""
        parser = self.parser
        opens = may_open_websocket(parser.get_method(), parser.get_http_version(), self.headers)
        return opens and not self._responding and super()._should_upgrade()

    @property
    def _responding(self) -> bool:
        """Whether the newest request waits for a response, or for its end."""
        return self.cycle is not None and not self.cycle.response_complete

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection to ``ws_protocol_class``, which counts it from then on."""
        self._set_deadline(None)
        self._limit.closed(self)
        if self.app is _respond_busy:
            self.transport.write(_BUSY)
            self.transport.close()
        else:
            assert self._gathering is not None
            self.transport = self._gathering.unwrap()
            super().handle_websocket_upgrade()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:
            self._limit.idle(self)
            if self._half_closed:
                self.transport.close()
            if self._arrival_timer is None:
                self._set_deadline(self._last_seconds, self._on_unread)

    def _on_unread(self) -> None:
        """Abort the connection if its last response is not read; else it is idle, which uvicorn ends."""
        idle = self.timeout_keep_alive + _IDLE_GRACE - self._last_seconds
        if self.transport.get_write_buffer_size() or idle <= 0:
            self.abort()
        else:
            self._set_deadline(idle)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client that only shut its sending side, until its whole request has its response.

        A closed connection looks alike until something is sent, so probes are sent until the status line. TLS and
        HTTP/1.0 have no probes: there, the end of a client's data is the end of its connection.
        """
        is_plain = self.transport.get_extra_info("sslcontext") is None
        complete = self._responding and not self.cycle.more_body
        if not (is_plain and complete and self.cycle.scope["http_version"] == "1.1"):
            return False
        if not self._half_closed:
            self._half_closed = True
            self._probe(_PROBE_SECONDS[0])
        return True

    def _probe(self, seconds: float) -> None:
        running = self._running
        if not self.transport.is_closing() and running is not None and not running.response_started:
            self.transport.write(_PROBE)
            self._probe_timer = self.loop.call_later(seconds, self._probe, _PROBE_SECONDS[1])

    def on_body(self, body: bytes) -> None:
        self._progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._progressed = True
        self._set_deadline(None)
        super().on_message_complete()

    def _set_deadline(self, seconds: float | None, then: Callable[[], None] | None = None) -> None:
        """Abort, or call ``then``, unless the next part of a request arrives in time; None: no part is expected."""
        if self._arrival_timer is not None:
            self._arrival_timer.cancel()
        self._arrival_timer = None if seconds is None else self.loop.call_later(seconds, then or self.abort)


async def _respond_busy(scope: Any, receive: Any, send: Any) -> None:
    body = b'{"error":{"message":"too many connections; retry later","type":"overloaded_error",'
    body += b'"param":null,"code":"overloaded"}}'
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(b"retry-after", _RETRY_SECONDS), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def abort_connection(scope: Any) -> None:
    """Close the connection of a request at once, with unread data."""
    if (abort := scope.get(ABORT)) is not None:
        abort()
