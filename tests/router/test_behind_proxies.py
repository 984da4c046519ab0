"""HTTP as proxies speak it: HEAD, redirects, compressed and announced bodies, idle connections, half-closed clients."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from machine import patience
from router_process import RouterProcess, router_process, wait_for
from scripted_node import Conversation, ScriptedNode

from router.options import parse_options

BODY: dict[str, Any] = {"prompt": "Hi", "max_tokens": 4, "cache_salt": "proxied"}
MAX_BYTES = 300_000


@pytest.fixture(scope="module")
def router(tokenizer_dir: Path, scripted_node: ScriptedNode) -> Iterator[RouterProcess]:
    async def script(conversation: Conversation) -> None:
        await asyncio.sleep(0.1)
        conversation.token(65, finish="length")

    async def endless(conversation: Conversation) -> None:
        await conversation.cancelled.wait()

    scripted_node.scripts |= {"proxied": script, "endless": endless}
    flags = ["--decode", scripted_node.address, "--max-body-bytes", str(MAX_BYTES), "--keep-alive-timeout", "1"]
    with router_process(tokenizer_dir, flags) as process:
        yield process


@pytest.fixture(scope="module")
def client(router: RouterProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=router.url, timeout=patience(20), trust_env=False) as client:
        yield client


@contextmanager
def connected(router: RouterProcess) -> Iterator[socket.socket]:
    host, _, port = router.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=patience(20)) as opened:
        yield opened


def request(body: dict[str, Any], version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def rest_of(opened: socket.socket) -> bytes:
    return b"".join(iter(lambda: opened.recv(65536), b""))


@pytest.mark.parametrize("path", ["/health", "/health/live", "/ping", "/metrics", "/v1/models", "/", "/openapi.json"])
def test_head_is_answered_like_get_without_a_body(client: httpx.Client, path: str) -> None:
    response = client.head(path)
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-type"] == client.get(path).headers["content-type"]


def test_head_of_a_path_for_posts_is_refused(client: httpx.Client) -> None:
    assert client.head("/v1/completions").status_code == 405


@pytest.mark.parametrize(
    ("path", "location"),
    [("/dashboard/", "../dashboard"), ("/health/?a=b", "../health?a=b"), ("/v1/completions/", "../completions")],
)
def test_redirects_are_relative(client: httpx.Client, path: str, location: str) -> None:
    response = client.post(path, json={}) if "completions" in path else client.get(path)
    assert (response.status_code, response.headers["location"]) == (307, location)


def test_last_slash_makes_no_path(client: httpx.Client) -> None:
    assert client.get("/nothing/").status_code == 404
    assert client.get("/v1/models/").json() == client.get("/v1/models").json()


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "GZIP", "identity"])
def test_compressed_bodies_are_read(client: httpx.Client, coding: str) -> None:
    data = json.dumps({**BODY, "metadata": {"a": "x" * 200_000}}).encode()
    sent = data if coding == "identity" else gzip.compress(data)
    headers = {"content-encoding": coding, "content-type": "application/json"}
    response = client.post("/v1/completions", content=sent, headers=headers)
    assert response.json()["choices"][0]["text"]
    assert client.post(
        "/tokenize", content=gzip.compress(b'{"prompt": "Hi"}'), headers={"content-encoding": "gzip"}
    ).json()


@pytest.mark.parametrize(
    ("coding", "data", "status", "words"),
    [
        ("br", b"x", 415, "send gzip"),
        ("deflate", zlib.compress(b"{}"), 415, "send gzip"),
        ("gzip, gzip", b"x", 415, "send gzip"),
        ("gzip", b"{}", 400, "not valid gzip"),
        ("gzip", b"", 400, "cut off"),
        ("gzip", gzip.compress(json.dumps(BODY).encode())[:-4], 400, "cut off"),
        ("gzip", gzip.compress(json.dumps(BODY).encode()) + b"more", 400, "one gzip member"),
        ("gzip", gzip.compress(b" " * 10_000_000, 1), 413, f"exceeds {MAX_BYTES} bytes"),
    ],
    ids=["br", "deflate", "twice", "plain", "empty", "cut", "longer", "bomb"],
)
def test_other_compressed_bodies_are_refused(
    client: httpx.Client, coding: str, data: bytes, status: int, words: str
) -> None:
    for path in ("/v1/completions", "/v1/messages"):
        response = client.post(path, content=data, headers={"content-encoding": coding})
        assert (response.status_code, words in response.json()["error"]["message"]) == (status, True)
        assert response.headers.get("accept-encoding") == ("gzip" if status == 415 else None)


def test_announced_body_that_is_too_large_is_refused_before_it_is_sent(router: RouterProcess) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n"
    with connected(router) as opened:
        opened.sendall(head.format(MAX_BYTES + 1).encode())
        assert rest_of(opened).startswith(b"HTTP/1.1 413")
    data = json.dumps(BODY).encode()
    with connected(router) as opened:
        opened.sendall(head.format(len(data)).encode())
        assert opened.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        opened.sendall(data)
        assert rest_of(opened).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_shuts_its_sending_side_gets_its_answer(router: RouterProcess, stream: bool) -> None:
    with connected(router) as opened:
        opened.sendall(request({**BODY, "stream": stream}))
        opened.shutdown(socket.SHUT_WR)
        answer = rest_of(opened)
    interim, _, final = answer.partition(b"HTTP/1.1 200")
    assert interim.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"") == b""
    assert b"[DONE]" in final if stream else json.loads(final.partition(b"\r\n\r\n")[2])["usage"]


def test_request_that_ends_within_its_body_ends_the_connection(router: RouterProcess) -> None:
    """The client waits for less time than a body may take."""
    with connected(router) as opened:
        opened.sendall(request(BODY)[:-5])
        opened.shutdown(socket.SHUT_WR)
        assert rest_of(opened) == b""


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_has_left_is_noticed_before_its_answer(
    router: RouterProcess, scripted_node: ScriptedNode, stream: bool
) -> None:
    with connected(router) as opened:
        opened.sendall(request({**BODY, "cache_salt": "endless", "stream": stream}))
        wait_for(lambda: "endless" in scripted_node.seen, patience(20))
    scripted_node.wait_cancelled("endless")
    del scripted_node.seen["endless"]


def test_idle_connections_end_after_their_time(router: RouterProcess) -> None:
    with connected(router) as opened:
        opened.sendall(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert rest_of(opened).startswith(b"HTTP/1.1 200")  # up to the end of the connection
    assert parse_options(["m"]).keep_alive_timeout > 650
