"""Requests with an Upgrade to other protocols than WebSocket keep their body (RFC 9110, 7.8), over TCP and TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvicorn
from certificates import write_https
from prometheus_client import CollectorRegistry, Gauge
from router_process import RouterProcess
from uvicorn.server import ServerState

from pdserve.http.connections import BoundedConnection, ConnectionLimit
from pdserve.http.metrics_server import MetricsServer
from router.https_server import HttpsServer
from router.websocket_connections import MessageMemory, WebSocketConnection

SECONDS = 20  # longest wait for an event that must come
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
SOCKET = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
SOCKET += b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"  # a body like a request

Seen = tuple[str, str, bytes]  # method, path and body of a request that the application got


class Server:
    """An application that echoes bodies, and keeps the first response open until ``answers`` is set."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self._config = uvicorn.Config(self._app, interface="asgi3", ws=self._socket, log_config=None)  # type: ignore[arg-type]
        self._limit = ConnectionLimit(10)

    def connection(self) -> BoundedConnection:
        return BoundedConnection(self._config, ServerState(), {}, limit=self._limit)

    def _socket(self, *args: Any, **kwargs: Any) -> WebSocketConnection:
        limits: dict[str, Any] = {"limit": self._limit, "memory": MessageMemory(1000), "stall_timeout": 60.0}
        return WebSocketConnection(*args, **kwargs, **limits, on_stall=lambda: None)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.close"})
            return
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.seen.append((scope["method"], scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begin", "more_body": True})
        await self.answers.wait()
        await send({"type": "http.response.body", "body": b"end"})


@asynccontextmanager
async def listening(server: Server, tls: Path | None) -> AsyncIterator[tuple[int, ssl.SSLContext | None]]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    if tls is None:
        plain = await asyncio.get_running_loop().create_server(server.connection, sock=listener)
        yield port, None
        plain.close()
        return
    ca = trustme.CA()
    write_https(tls / "cert.pem", tls / "key.pem", ca)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls / "cert.pem", tls / "key.pem")
    trust = ssl.create_default_context()
    ca.configure_trust(trust)
    https = HttpsServer(listener, context, server.connection)
    yield port, trust
    https.close()
    listener.close()


async def answer_to(port: int, parts: list[bytes], tls: ssl.SSLContext | None = None) -> bytes:
    """Send the parts, which the server receives one by one, and read until the server closes the connection."""
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.002)
        answer = await reader.read()
        writer.close()
    return answer


def answer_and_seen(parts: list[bytes], tls: Path | None = None) -> tuple[bytes, list[Seen]]:
    async def run() -> tuple[bytes, list[Seen]]:
        server = Server()
        async with listening(server, tls) as (port, trust):
            return await answer_to(port, parts, trust), server.seen

    return asyncio.run(run())


def split(data: bytes, how: str) -> list[bytes]:
    head, _, body = data.partition(b"\r\n\r\n")
    pieces = [data[start : start + 16] for start in range(0, len(data), 16)]
    return {"one": [data], "two": [head + b"\r\n\r\n", body], "pieces": pieces}[how]


@pytest.mark.parametrize("tls", [False, True], ids=["tcp", "tls"])
@pytest.mark.parametrize("arrives", ["one", "two", "pieces"])
@pytest.mark.parametrize(
    "framing", [b"Content-Length: %d\r\n\r\n%b", b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize(
    "upgrade",
    [H2C, SOCKET, b"Connection: keep-alive, upgrade\r\nUpgrade: foo/2, websocket\r\n"],
    ids=["h2c", "ws", "list"],
)
def test_body_after_an_ignored_upgrade_is_read(
    upgrade: bytes, framing: bytes, arrives: str, tls: bool, tmp_path: Path
) -> None:
    request = b"POST /first HTTP/1.1\r\nHost: x\r\n" + upgrade + framing % (len(HIDDEN), HIDDEN)
    answer, seen = answer_and_seen(split(request + LAST, arrives), tmp_path if tls else None)
    assert seen == [("POST", "/first", HIDDEN), ("GET", "/last", b"")]
    assert answer.count(b"HTTP/1.1 200 OK") == 2


def test_pipelined_requests_with_upgrades_are_answered_in_order() -> None:
    one = b"PUT /%d HTTP/1.1\r\nHost: x\r\n" + H2C + b"Content-Length: 3\r\n\r\nabc"
    _, seen = answer_and_seen([b"".join(one % n for n in range(50)) + LAST])
    assert seen == [*[("PUT", f"/{n}", b"abc") for n in range(50)], ("GET", "/last", b"")]


def test_upgrade_that_asks_for_an_interim_response_gets_it() -> None:
    head = b"POST /first HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n" + H2C + b"\r\n"
    answer, seen = answer_and_seen([head, b"ab" + LAST])
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert seen == [("POST", "/first", b"ab"), ("GET", "/last", b"")]


@pytest.mark.parametrize("arrives", ["one", "two", "pieces"])
@pytest.mark.parametrize(
    ("version", "connection"), [(b"1.0", b"Upgrade"), (b"1.0", b"keep-alive, Upgrade"), (b"1.1", b"Upgrade, close")]
)
def test_upgrade_of_the_last_request_of_a_connection_is_ignored(
    version: bytes, connection: bytes, arrives: str
) -> None:
    upgrade = b"Connection: %b\r\nUpgrade: websocket\r\nContent-Length: 2\r\n\r\nab" % connection
    answer, seen = answer_and_seen(split(b"POST /first HTTP/%b\r\nHost: x\r\n" % version + upgrade, arrives))
    assert seen == [("POST", "/first", b"ab")]
    assert b" 200 OK" in answer


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /first HTTP/1.1\r\nConnection: close\r\n\r\n", b"400"),
        (b"GET /first HTTP/1.1\r\nHost: x\r\nHost: x\r\nConnection: close\r\n\r\n", b"400"),
        (b"GET /first HTTP/1.0\r\nHost: x\r\nHost: y\r\n\r\n", b"400"),
        (b"GET /first HTTP/1.1\r\n" + SOCKET + b"\r\n", b"400"),
        (b"GET /first HTTP/1.1\r\nHost:\r\nConnection: close\r\n\r\n", b"200"),
        (b"GET /first HTTP/1.0\r\n\r\n", b"200"),
    ],
)
def test_request_has_one_host_field(request_: bytes, status: bytes) -> None:
    answer, seen = answer_and_seen([request_])
    assert answer.split(b" ")[1] == status
    assert len(seen) == (status == b"200")


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 2\r\n\r\nab", b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"]
)
def test_websocket_handshake_with_a_body_is_a_request(framing: bytes) -> None:
    _, seen = answer_and_seen([b"GET /first HTTP/1.1\r\nHost: x\r\n" + SOCKET + framing + LAST])
    assert seen == [("GET", "/first", b"ab"), ("GET", "/last", b"")]


def test_websocket_handshake_behind_a_running_response_is_a_request() -> None:
    """A handshake switches the protocol at once, in the middle of that response."""

    async def run() -> tuple[bytes, list[Seen]]:
        server = Server()
        server.answers.clear()
        async with listening(server, None) as (port, _):
            parts = [
                b"GET /first HTTP/1.1\r\nHost: x\r\n\r\n",
                b"GET /second HTTP/1.1\r\nHost: x\r\n" + SOCKET + b"\r\n" + LAST,
            ]
            answering = asyncio.create_task(answer_to(port, parts))
            await asyncio.sleep(0.1)
            server.answers.set()
            return await answering, server.seen

    answer, seen = asyncio.run(run())
    assert [path for _, path, _ in seen] == ["/first", "/second", "/last"]
    assert answer.count(b"HTTP/1.1 200 OK") == 3


def test_websocket_handshake_is_an_upgrade() -> None:
    close = b"\x88\x80" + bytes(4)
    answer, seen = answer_and_seen([b"GET /first HTTP/1.1\r\nHost: x\r\n" + SOCKET + b"\r\n", close])
    assert answer.startswith(b"HTTP/1.1 101 ")
    assert seen == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [(b"X: y\r\n" * 200, b"431"), (b"X: " + b"y" * 9000 + b"\r\n", b"431")],
    ids=["many headers", "a long header"],
)
def test_websocket_handshake_with_large_headers_is_refused(headers: bytes, status: bytes) -> None:
    answer, _ = answer_and_seen([b"GET /first HTTP/1.1\r\nHost: x\r\n" + SOCKET + headers + b"\r\n"])
    assert answer.split(b" ")[1] == status


@pytest.mark.parametrize("target", [b"host:80", b"/first"])
@pytest.mark.parametrize("arrives", ["one", "two"])
def test_connect_ends_the_connection(target: bytes, arrives: str) -> None:
    """Bytes behind it are of another protocol, which this server does not tunnel."""
    request = b"CONNECT %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (target, len(HIDDEN)) + HIDDEN
    answer, seen = answer_and_seen(split(request, arrives))
    assert answer.split(b" ")[1] == b"400"
    assert seen == []


def test_invalid_bytes_behind_a_running_response_add_nothing_to_it() -> None:
    async def run() -> bytes:
        server = Server()
        server.answers.clear()
        async with listening(server, None) as (port, _):
            try:
                return await answer_to(port, [b"GET /first HTTP/1.1\r\nHost: x\r\n\r\n", b"\0" * 100])
            except ConnectionResetError:
                return b""

    assert b"400" not in asyncio.run(run())


def test_metrics_port_reads_the_body_of_an_upgrade() -> None:
    async def run() -> bytes:
        registry = CollectorRegistry()
        Gauge("one", "A metric.", registry=registry).set(1)
        server = MetricsServer("127.0.0.1", 0)
        port = server._socket.getsockname()[1]
        await server.start(registry)
        framing = b"Content-Length: %d\r\n\r\n" % len(HIDDEN)
        head = b"POST /metrics HTTP/1.1\r\nHost: x\r\n" + H2C + framing
        answer = await answer_to(port, [head, HIDDEN + LAST])
        server.close()
        return answer

    answer = asyncio.run(run())
    assert answer.count(b"HTTP/1.1 ") == 2, "the body is not a request"
    assert answer.count(b"one 1.0") == 1


def test_malformed_requests_cost_a_log_line_together(caplog: pytest.LogCaptureFixture) -> None:
    """The limit also holds for valid requests that offer an Upgrade."""

    async def run() -> None:
        server = MetricsServer("127.0.0.1", 0)
        port = server._socket.getsockname()[1]
        await server.start(CollectorRegistry())
        for _ in range(10):
            await answer_to(port, [b"nonsense\r\n\r\n"])
            await answer_to(port, [b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + H2C + b"\r\n", LAST])
        server.close()

    asyncio.run(run())
    lines = [record.message for record in caplog.records if record.name == "uvicorn.error"]
    assert len(lines) == len(set(lines)), lines


def test_router_reads_the_body_of_a_client_that_offers_h2c(router: RouterProcess) -> None:
    """Every HttpClient of the JDK does, unless it is told otherwise."""
    port = router.address.rpartition(":")[2]
    body = b'{"prompt": [1], "n": 0}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + H2C + b"Content-Length: %d\r\n\r\n" % len(body)
    answer = asyncio.run(answer_to(int(port), [head, body + LAST.replace(b"/last", b"/health")]))
    assert b"n is 0" in answer
    assert b"200 OK" in answer
