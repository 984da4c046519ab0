"""Connections of clients: idle ones beyond the limit, and clients that close at every stage."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from machine import patience
from router_process import RouterProcess, router_process, wait_for
from scripted_node import Conversation, ScriptedNode

from pdserve.errors import ConfigError
from router.options import RouterOptions
from router.server import _max_connections

START = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
LIMIT = 40


@pytest.fixture(scope="module")
def limited(tokenizer_dir: Path, scripted_node: ScriptedNode) -> Iterator[RouterProcess]:
    """A router with a small limit of connections."""

    async def linger(conversation: Conversation) -> None:
        conversation.token(65)
        await conversation.cancelled.wait()

    async def burst(conversation: Conversation) -> None:
        for _ in range(499):
            conversation.token(65)
        conversation.token(65, finish="length")

    scripted_node.scripts |= {"linger": linger, "burst": burst}
    flags = ["--decode", scripted_node.address, "--max-connections", str(LIMIT), "--sse-keep-alive", "0.5"]
    with router_process(tokenizer_dir, flags) as process:
        yield process


def connect(process: RouterProcess) -> socket.socket:
    host, _, port = process.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=patience(20))


def health(process: RouterProcess) -> httpx.Response:
    return httpx.get(f"{process.url}/health", trust_env=False, timeout=patience(20))


def metrics(process: RouterProcess) -> dict[str, float]:
    lines = httpx.get(f"{process.url}/metrics", trust_env=False, timeout=patience(20)).text.splitlines()
    return {name: float(value) for name, _, value in (line.partition(" ") for line in lines if line[0] != "#")}


def is_closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        sock.settimeout(20)


def request(sock: socket.socket, data: bytes) -> bytes:
    """Send a request and return the start of the response."""
    sock.sendall(data)
    return sock.recv(4096)


KEPT = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"


def stream_request(salt: str, header: bytes = b"") -> bytes:
    body = json.dumps({"prompt": [1], "cache_salt": salt, "stream": True, "max_tokens": 900}).encode()
    return START + header + b"Content-Length: %d\r\n\r\n" % len(body) + body


STREAM = stream_request("linger")
LAST = stream_request("burst", b"Connection: close\r\n")


@pytest.mark.parametrize("sent", [b"", b"POST /v1", START + b"X: y\r\n", KEPT], ids=["none", "line", "headers", "kept"])
def test_longest_idle_connections_are_closed_for_new_ones(limited: RouterProcess, sent: bytes) -> None:
    wait_for(lambda: metrics(limited)["pdserve_connections"] == 1)
    before = metrics(limited)["pdserve_evicted_connections_total"]
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(limited)) for _ in range(LIMIT)]
        for sock in idle:
            sock.sendall(sent)
            if sent == KEPT:
                assert b" 200 " in sock.recv(4096)
        for _ in range(5):
            assert health(limited).status_code == 200
        wait_for(lambda: is_closed(idle[0]))
        assert not is_closed(idle[-1]), "the latest ones stay"
        for _ in range(2 * LIMIT):
            stack.enter_context(connect(limited))
        assert health(limited).status_code == 200
        counts = metrics(limited)
        assert counts["pdserve_evicted_connections_total"] >= before + 2 * LIMIT
        assert counts["pdserve_connections"] <= LIMIT + 1


def test_request_beyond_busy_connections_gets_503(limited: RouterProcess) -> None:
    with ExitStack() as stack:
        busy = [stack.enter_context(connect(limited)) for _ in range(LIMIT)]
        for sock in busy:
            assert b" 200 " in request(sock, STREAM)
        for _ in range(3):
            refused = health(limited)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "overloaded_error"
        assert not any(is_closed(sock) for sock in busy)
        busy.pop().close()
        wait_for(lambda: health(limited).status_code == 200)
    wait_for(lambda: health(limited).status_code == 200)
    assert metrics(limited)["pdserve_refused_connections_total"] >= 3


def test_connections_with_the_unread_end_of_a_response_give_way(limited: RouterProcess) -> None:
    """The connections are closing, and hold 30 to 60 KB of 100 that their client does not read."""
    with ExitStack() as stack:
        for _ in range(LIMIT + 5):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, _, port = limited.address.rpartition(":")
            sock.connect((host, int(port)))
            assert b" 200 " in request(sock, LAST)
        assert health(limited).status_code == 200


def test_honest_client_is_served_beside_1500_idle_connections(tokenizer_dir: Path, scripted_node: ScriptedNode) -> None:
    """The router may open 1,024 files, the limit of many systems."""
    flags = ["--decode", scripted_node.address]
    with router_process(tokenizer_dir, flags, files=1024) as process, ExitStack() as stack:
        for number in range(1500):
            stack.enter_context(connect(process))
            if number % 100 == 0:
                assert health(process).status_code == 200
        for _ in range(10):
            assert health(process).status_code == 200
        assert metrics(process)["pdserve_connections"] <= 768 + 1


def test_limit_beyond_the_open_files_is_refused() -> None:
    with pytest.raises(ConfigError, match="exceeds three quarters of the limit of open files"):
        _max_connections(RouterOptions(models=(), max_connections=10**6))


def closing_requests() -> Iterator[tuple[bytes, bool]]:
    """Yield what a client sends before it closes, and whether it reads the first bytes of the response."""
    whole = json.dumps({"prompt": [1] * 4, "cache_salt": "long", "max_tokens": 900, "n": 1}).encode()
    head = START + b"Content-Length: %d\r\n\r\n" % len(whole)
    for part in (b"", START[:9], START, head, head + whole[:5], head + whole):
        yield part, False
    for data in (STREAM, STREAM * 2, STREAM + KEPT, KEPT, KEPT * 200, b"nonsense\r\n\r\n"):
        yield data, False
        yield data, True


@pytest.mark.parametrize("reset", [pytest.param(False, marks=pytest.mark.slow), True], ids=["fin", "reset"])
def test_clients_that_close_at_any_stage_leave_no_traceback(
    tokenizer_dir: Path, scripted_node: ScriptedNode, capfd: pytest.CaptureFixture[str], reset: bool
) -> None:
    async def tokens(conversation: Conversation) -> None:
        while not conversation.cancelled.is_set():
            for _ in range(20):
                conversation.token(65)
            await asyncio.sleep(0.02)  # 1,000 tokens per second and request, which a starved router can read

    scripted_node.scripts |= {"long": tokens, "linger": tokens}
    with router_process(tokenizer_dir, ["--decode", scripted_node.address]) as process:
        for data, reads in [*closing_requests()] * 10:
            with connect(process) as sock, contextlib.suppress(ConnectionError):
                sock.sendall(data)
                if reads:
                    sock.recv(64)
                if reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_for(lambda: metrics(process)["pdserve_requests_in_flight"] == 0, 60.0)
        assert health(process).status_code == 200
    log = capfd.readouterr().err
    assert "Traceback" not in log, log
    assert " ERROR " not in log, log
