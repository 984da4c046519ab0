"""Connections to an HTTPS router count from accept: unfinished handshakes give way like other idle connections."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import trustme
from certificates import write_https
from machine import patience
from router_process import RouterProcess, router_process, wait_for
from scripted_node import Conversation, ScriptedNode
from test_connections import KEPT, LIMIT, STREAM, connect, is_closed

HELLO = b"\x16\x03\x01\x02\x00\x01"  # the first bytes of a handshake


class HttpsRouter:
    def __init__(self, process: RouterProcess, ca: trustme.CA) -> None:
        self.process = process
        self._context = ssl.create_default_context()
        ca.configure_trust(self._context)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(
            f"https://{self.process.address}{path}", verify=self._context, trust_env=False, timeout=patience(20)
        )

    def metrics(self) -> dict[str, float]:
        lines = self.get("/metrics").text.splitlines()
        return {name: float(value) for name, _, value in (line.partition(" ") for line in lines if line[0] != "#")}

    def connect(self) -> ssl.SSLSocket:
        return self._context.wrap_socket(connect(self.process), server_hostname="127.0.0.1")


@contextmanager
def https_router(model_dir: Path, node: ScriptedNode, *flags: str, files: int | None = None) -> Iterator[HttpsRouter]:
    ca = trustme.CA()
    cert = model_dir / "cert.pem"
    key = model_dir / "key.pem"
    write_https(cert, key, ca)
    flags = ("--decode", node.address, "--tls-cert", str(cert), "--tls-key", str(key), *flags)
    with router_process(model_dir, flags, files=files) as process:
        yield HttpsRouter(process, ca)


@pytest.fixture(scope="module")
def limited(tokenizer_dir: Path, scripted_node: ScriptedNode) -> Iterator[HttpsRouter]:
    async def linger(conversation: Conversation) -> None:
        conversation.token(65)
        await conversation.cancelled.wait()

    scripted_node.scripts["linger"] = linger
    with https_router(tokenizer_dir, scripted_node, "--max-connections", str(LIMIT)) as router:
        yield router


@pytest.mark.parametrize("sent", [b"", HELLO], ids=["none", "half a hello"])
def test_honest_client_is_served_beside_1500_unfinished_handshakes(
    tokenizer_dir: Path, scripted_node: ScriptedNode, sent: bytes
) -> None:
    """The router may open 1,024 files, the limit of many systems."""
    with https_router(tokenizer_dir, scripted_node, files=1024) as router, ExitStack() as stack:
        for number in range(1500):
            stack.enter_context(connect(router.process)).sendall(sent)
            if number % 300 == 0:
                assert router.get("/health").status_code == 200
        for _ in range(10):
            assert router.get("/health").status_code == 200
        counts = router.metrics()
        assert counts["pdserve_connections"] <= 768 + 1
        assert counts["pdserve_evicted_connections_total"] >= 1500 - 768


def test_longest_idle_connections_are_closed_whether_or_not_they_have_shaken_hands(limited: HttpsRouter) -> None:
    with ExitStack() as stack:
        bare = [stack.enter_context(connect(limited.process)) for _ in range(LIMIT // 2)]
        kept = [stack.enter_context(limited.connect()) for _ in range(LIMIT // 2)]
        for sock in kept:
            sock.sendall(KEPT)
            assert b" 200 " in sock.recv(4096)
        for _ in range(5):
            assert limited.get("/health").status_code == 200
        wait_for(lambda: is_closed(bare[0]))
        assert not is_closed(bare[-1]), "the latest ones stay"
        for _ in range(LIMIT):
            stack.enter_context(connect(limited.process))
        assert limited.get("/health").status_code == 200
        wait_for(lambda: is_closed(bare[-1]))
        for sock in kept:
            with suppress(ssl.SSLError, ConnectionError):  # a timeout is neither
                while sock.recv(4096):
                    pass


def test_request_beyond_busy_connections_gets_503_over_https(limited: HttpsRouter) -> None:
    with ExitStack() as stack:
        busy = [stack.enter_context(limited.connect()) for _ in range(LIMIT)]
        for sock in busy:
            sock.sendall(STREAM)
            assert b" 200 " in sock.recv(4096)
        for _ in range(2 * LIMIT):
            stack.enter_context(connect(limited.process))
        refused = limited.get("/health")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
    wait_for(lambda: limited.get("/health").status_code == 200)


def test_connections_that_wait_for_the_end_of_tls_give_way(limited: HttpsRouter) -> None:
    """The response is complete, and the client closes neither TLS nor the connection."""
    with ExitStack() as stack:
        for _ in range(LIMIT + 5):
            sock = stack.enter_context(limited.connect())
            sock.sendall(KEPT.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            assert b" 200 " in sock.recv(4096)
        assert limited.get("/health").status_code == 200


def test_ended_connections_are_not_counted(limited: HttpsRouter) -> None:
    """Half handshakes, garbage, and handshakes that the client rejects."""
    for sent in (b"", HELLO, b"GET / HTTP/1.1\r\n\r\n"):
        with connect(limited.process) as sock:
            sock.sendall(sent)
    strict = ssl.create_default_context()
    with connect(limited.process) as sock, pytest.raises(ssl.SSLCertVerificationError):
        strict.wrap_socket(sock, server_hostname="127.0.0.1")
    wait_for(lambda: limited.metrics()["pdserve_connections"] == 1)
