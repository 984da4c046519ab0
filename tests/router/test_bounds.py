"""Limits on size, depth and speed of requests, over real sockets to a real router."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import pytest
import uvicorn
from machine import patience
from router_process import RouterProcess
from scripted_node import Conversation, ScriptedNode
from uvicorn.server import ServerState

from pdserve.http import connections as connections
from pdserve.http.connections import BoundedConnection, ConnectionLimit

USER = {"role": "user", "content": "hi"}


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"documents": [{"a": nested(200)}]}, None, "more than 100 levels"),
        ({"chat_template_kwargs": {"prompt": nested(200)}}, None, "more than 100 levels"),
        ({"documents": [{"a": [[]] * 250_000}]}, None, "more than 100000 objects"),
        ({"messages": [USER] * 10_001}, "messages", "limit is 10000"),
        ({"tools": [{}] * 1025}, "tools", "1025 tools exceed 1024"),
        ({"chat_template_kwargs": {str(n): n for n in range(65)}}, "chat_template_kwargs", "limit is 64"),
        ({"logit_bias": {str(n): 0 for n in range(1025)}}, "logit_bias", "limit is 1024"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "limit is 1024"),
        ({"cache_salt": "x" * 1025}, "cache_salt", "limit is 1024"),
        ({"stop": "x" * 4097}, "stop", "limit is 4096"),
        ({"stop": ["a", "x" * 4097]}, "stop", "limit is 4096"),
    ],
)
def test_exceeded_limit_names_the_field(client: httpx.Client, fields: dict[str, Any], param: str, said: str) -> None:
    response = client.post("/v1/chat/completions", json={"messages": [USER], **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert said in error["message"]
    assert error["param"] == param


def test_endlessly_nested_json_is_rejected(client: httpx.Client) -> None:
    for depth, said in ((50_000, "not valid JSON"), (1_000_000, "more than 100000 objects, lists")):
        response = client.post("/v1/chat/completions", content=b'{"messages":' + b"[" * depth)
        assert response.status_code == 400
        assert said in response.json()["error"]["message"]


@pytest.mark.parametrize(("path", "param"), [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")])
def test_oversized_text_is_rejected_before_tokenization(client: httpx.Client, path: str, param: str) -> None:
    text = "x" * 1_000_000
    body = {"prompt": text} if param == "prompt" else {"messages": [{"role": "user", "content": text}]}
    error = client.post(path, json=body).json()["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert "bytes; the 1000 tokens of the model hold at most" in error["message"]


@pytest.mark.parametrize(
    "name",
    [
        "prefill_node",
        "node",
        "decode",
        "lease",
        "epoch",
        "block_ids",
        "kv_transfer_params",
        "port",
        "resume",
        "timeout_ms",
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_no_parameter_names_internal_state(client: httpx.Client, path: str, name: str) -> None:
    body = {"prompt": [1]} if path == "/v1/completions" else {"messages": [USER]}
    error = client.post(path, json={**body, name: "x"}).json()["error"]
    assert error["param"] == name
    assert error["code"] in ("unknown_parameter", "unsupported_parameter")


def test_headers_and_extra_parameters_do_not_reach_nodes(client: httpx.Client, scripted_node: ScriptedNode) -> None:
    async def answer(conversation: Conversation) -> None:
        conversation.token(65, finish="length")

    scripted_node.scripts["names"] = answer
    body = {"prompt": [1], "cache_salt": "names", "seed": 1, "user": "p9:1", "metadata": {"prefill_node": "p9:1"}}
    options = {"include_usage": True, "prefill_node": "p9:1", "epoch": "1"}
    headers = {
        f"x-{name}": "p9:1" for name in ("prefill-node", "decode-node", "request-id", "lease", "data-parallel-rank")
    }
    seen = []
    for sent, extra in (({}, {}), (headers, {"stream": True, "stream_options": options})):
        response = client.post("/v1/completions?prefill_node=p9:1", json={**body, **extra}, headers=sent)
        assert response.status_code == 200
        message = scripted_node.seen["names"].message
        assert message.request_id not in ("", "p9:1")
        message.request = 0
        message.request_id = ""
        message.timeout_ms = 0
        message.age_ms = 0
        seen.append(message)
    assert seen[0] == seen[1]
    assert seen[0].prefill_node == ""


def connect(router: RouterProcess) -> socket.socket:
    host, _, port = router.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=patience(20))


def answer_to(router: RouterProcess, *parts: bytes) -> bytes:
    """Read until the router closes the connection."""
    received = b""
    with connect(router) as sock:
        try:
            for part in parts:
                sock.sendall(part)
            while chunk := sock.recv(1 << 16):
                received += chunk
        except (ConnectionResetError, BrokenPipeError):
            pass
    return received


START = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([START, *[b"X: %s\r\n" % (b"y" * 1000)] * 200], id="many headers"),
        pytest.param([START, b"X: ", *[b"y" * 10_000] * 200], id="a long header"),
        pytest.param([b"GET /", *[b"y" * 10_000] * 200], id="a long path"),
        pytest.param([b"\0" * 1000], id="garbage"),
        pytest.param([START, b"Transfer-Encoding: chunked\r\n\r\n0\r\n", *[b"X: y\r\n" * 1000] * 200], id="trailers"),
        pytest.param(
            [START, b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ", *[b"y" * 10_000] * 200], id="a long trailer"
        ),
    ],
)
def test_endless_headers_close_the_connection(router: RouterProcess, client: httpx.Client, parts: list[bytes]) -> None:
    """The connection ends long before twenty times the limit has been sent."""
    answer = answer_to(router, *parts)
    assert answer == b"" or answer.split(b" ")[1] in (b"400", b"431")
    assert client.get("/health").status_code == 200


class Transport(asyncio.Transport):
    """Bytes written by a connection, and whether it is still open."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.1", 2)})
        self.ended = asyncio.Event()
        self.closing = False

    def abort(self) -> None:
        self.closing = True
        self.ended.set()

    def close(self) -> None:
        """The client reads none of the bytes that are left to write."""
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: Any) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 100_000

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADER_SECONDS", "BODY_SECONDS", "LAST_GRACE_SECONDS"):
        monkeypatch.setattr(connections, name, 0.05)


def until_ended(
    *parts: bytes, unread: bool = False, responds: bool = False, stall_timeout: float = 0.05, patience: float = 20.0
) -> None:
    """Return once the router aborts a connection that sent only ``parts``.

    Raises TimeoutError if it does not within ``patience`` seconds.
    """

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if responds:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
            await send({"type": "http.response.body", "body": b"x"})
        while not responds and (await receive())["type"] != "http.disconnect":
            pass

    async def run() -> None:
        transport = Transport()
        config = uvicorn.Config(app, log_config=None)
        connection = BoundedConnection(config, ServerState(), {}, limit=ConnectionLimit(1), stall_timeout=stall_timeout)
        connection.connection_made(transport)
        for part in parts:
            connection.data_received(part)
        if unread:
            connection.pause_writing()
        async with asyncio.timeout(patience):
            await transport.ended.wait()
        connection.connection_lost(None)
        await asyncio.gather(*connection.tasks)

    asyncio.run(run())


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([], id="nothing"),
        pytest.param([b"GET /hea"], id="half a line"),
        pytest.param([START, b"X: y\r\n"], id="half of the headers"),
        pytest.param([START, b"Content-Length: 9\r\n\r\n", b"x"], id="half a body"),
    ],
)
def test_incomplete_request_is_aborted(short_times: None, parts: list[bytes]) -> None:
    until_ended(*parts)


@pytest.mark.parametrize("header", ["keep-alive", "close"])
def test_unread_end_of_a_response_is_aborted(short_times: None, header: str) -> None:
    """The connection has taken the whole response."""
    until_ended(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: %s\r\n\r\n" % header.encode(), responds=True)


def test_unread_end_of_a_response_is_kept_as_long_as_the_rest(short_times: None) -> None:
    """With ``--client-stall-timeout``, a client may also leave the last part unread for so long."""
    with pytest.raises(TimeoutError):
        until_ended(START, b"\r\n", responds=True, stall_timeout=60.0, patience=0.3)


def test_unread_response_is_aborted(short_times: None) -> None:
    until_ended(START, b"Content-Length: 0\r\n\r\n", unread=True)


def test_complete_request_may_take_long(client: httpx.Client, router: RouterProcess) -> None:
    """Send a slow but valid request byte by byte, then another on the same connection."""
    body = json.dumps({"prompt": [1], "n": 0}).encode()
    head = START + b"Content-Length: %d\r\n\r\n" % len(body)
    with connect(router) as sock:
        for _ in range(2):
            for byte in head + body:
                sock.sendall(bytes([byte]))
            time.sleep(0.01)
            answer = b""
            while b"n is 0" not in answer:  # head and body may arrive separately
                data = sock.recv(1 << 16)
                assert data, answer
                answer += data
