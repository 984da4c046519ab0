"""WebSockets at /v1/responses, with the client of the package websockets."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from certificates import write_https
from machine import patience
from router_process import MODEL, RouterProcess, router_process, wait_for
from scripted_node import Conversation, ScriptedNode
from websockets.asyncio.client import ClientConnection as TlsConnection
from websockets.asyncio.client import connect as connect_tls
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from router.gate.api_keys import key_entry, new_key
from router.gate.keys import Client
from router.text.tokenizer import Tokenizer

LAST = "response.completed", "response.incomplete", "response.failed", "error"
Say = Callable[..., dict[str, Any]]


@contextmanager
def socket(router: RouterProcess, path: str = "/v1/responses", **fields: Any) -> Iterator[ClientConnection]:
    with connect(
        f"ws://{router.address}{path}",
        proxy=None,
        compression=None,
        open_timeout=patience(20),
        close_timeout=1,
        **fields,
    ) as opened:
        yield opened


@pytest.fixture
def say(say_text: Callable[..., Any]) -> Say:
    """Makes the node say a text; returns a message that gets it."""

    def message(text: str, **fields: Any) -> dict[str, Any]:
        extra = say_text(text)["extra_body"]
        return {"type": "response.create", "model": MODEL, "input": "Hi", "store": False, **extra, **fields}

    return message


def events(opened: ClientConnection, message: dict[str, Any] | str | bytes | None = None) -> list[dict[str, Any]]:
    """Send a message, if any; return the events of the next response, or its error."""
    if message is not None:
        opened.send(json.dumps(message) if isinstance(message, dict) else message, text=True)
    received: list[dict[str, Any]] = []
    while not received or received[-1]["type"] not in LAST:
        received.append(json.loads(opened.recv(timeout=patience(20))))
    return received


async def events_over_tls(opened: TlsConnection, message: str) -> list[dict[str, Any]]:
    """``events`` of the asyncio client: threads may not share a TLS connection before Python 3.13."""
    await opened.send(message)
    received: list[dict[str, Any]] = []
    while not received or received[-1]["type"] not in LAST:
        received.append(json.loads(await asyncio.wait_for(opened.recv(), 20)))
    return received


def text_of(received: list[dict[str, Any]]) -> str:
    assert received[-1]["type"] == "response.completed", received[-1]
    assert [event["sequence_number"] for event in received] == list(range(len(received)))
    text = "".join(event["delta"] for event in received if event["type"] == "response.output_text.delta")
    assert received[-1]["response"]["output"][-1]["content"][0]["text"] == text
    return text


def prompt_of(node: ScriptedNode, tokenizer: Tokenizer, salt: str) -> str:
    return tokenizer.decode(node.seen[salt].prompt)


def test_turns_continue_the_latest_response_without_a_store(
    reading_router: RouterProcess, say: Say, scripted_node: ScriptedNode, reading_tokenizer: Tokenizer, request: Any
) -> None:
    with socket(reading_router) as opened:
        first = events(opened, say("one"))
        assert text_of(first) == "one"
        assert first[-1]["response"]["store"] is False
        second = events(opened, say("two", previous_response_id=first[-1]["response"]["id"], input="And?"))
        assert text_of(second) == "two"
        assert second[-1]["response"]["previous_response_id"] == first[-1]["response"]["id"]
        third = events(opened, say("three", previous_response_id=second[-1]["response"]["id"], input="So?"))
        assert text_of(third) == "three"
        prompt = prompt_of(scripted_node, reading_tokenizer, request.node.name)
        assert "".join(prompt.split()).endswith(
            "userHi<|im_end|><|im_start|>assistantone<|im_end|><|im_start|>userAnd?<|im_end|>"
            "<|im_start|>assistanttwo<|im_end|><|im_start|>userSo?<|im_end|><|im_start|>assistant"
        )
    with socket(reading_router) as opened:
        (missing,) = events(opened, say("x", previous_response_id=third[-1]["response"]["id"]))
        assert (missing["status"], missing["error"]["code"]) == (400, "previous_response_not_found")


def test_failed_turn_drops_the_response_it_continues(reading_router: RouterProcess, say: Say) -> None:
    with socket(reading_router) as opened:
        first = events(opened, say("one"))[-1]["response"]["id"]
        result = {"type": "function_call_output", "call_id": "call_missing", "output": "x"}
        (failed,) = events(opened, say("x", previous_response_id=first, input=[result]))
        assert failed["status"] == 400
        (dropped,) = events(opened, say("x", previous_response_id=first))
        assert dropped["error"]["code"] == "previous_response_not_found"
        assert text_of(events(opened, say("still open"))) == "still open"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("{", "JSON"),
        (b"\xff", "JSON"),
        ({"type": "session.update"}, "response.create"),
        ({"type": "response.create", "model": MODEL, "input": "Hi", "background": True}, "background"),
        ({"type": "response.create", "model": MODEL, "input": "Hi", "stream": False}, "stream"),
        ({"type": "response.create", "model": "other", "input": "Hi"}, "not served"),
    ],
)
def test_bad_message_gets_an_error_and_the_connection_stays(
    reading_router: RouterProcess, say: Say, message: Any, words: str
) -> None:
    with socket(reading_router) as opened:
        (error,) = events(opened, message)
        assert error["type"] == "error"
        assert error["status"] in (400, 404)
        assert error["error"]["code"]
        assert words in error["error"]["message"]
        assert text_of(events(opened, say("fine"))) == "fine"


def test_messages_sent_at_once_are_answered_in_order(reading_router: RouterProcess, say: Say) -> None:
    with socket(reading_router) as opened:
        message = json.dumps(say("text"))
        for _ in range(4):
            opened.send(message)
        answers = [events(opened) for _ in range(4)]
    assert [text_of(answer) for answer in answers] == ["text"] * 4
    assert len({answer[-1]["response"]["id"] for answer in answers}) == 4


def test_client_that_leaves_cancels_its_response(
    reading_router: RouterProcess, say: Say, scripted_node: ScriptedNode, request: Any
) -> None:
    async def script(conversation: Conversation) -> None:
        conversation.token(65)
        await asyncio.Event().wait()

    message = say("")
    scripted_node.scripts[request.node.name] = script
    with socket(reading_router) as opened:
        opened.send(json.dumps(message))
        opened.recv(timeout=patience(20))
    scripted_node.wait_cancelled(request.node.name)


def test_client_that_does_not_read_pauses_its_response(
    reading_router: RouterProcess, say: Say, scripted_node: ScriptedNode, request: Any
) -> None:
    async def script(conversation: Conversation) -> None:
        while not conversation.paused:
            conversation.token(65)
            await asyncio.sleep(0)

    message = say("")
    scripted_node.scripts[request.node.name] = script
    with socket(reading_router, max_queue=1) as opened:
        opened.send(json.dumps(message))
        wait_for(lambda: request.node.name in scripted_node.seen and scripted_node.seen[request.node.name].paused)


def test_other_paths_and_other_pages_are_refused(reading_router: RouterProcess) -> None:
    for path, origin in (("/v1/chat/completions", None), ("/v1/responses", "http://evil.example")):
        with pytest.raises(InvalidStatus) as caught, socket(reading_router, path, origin=origin):
            pass
        assert caught.value.response.status_code == 403


def test_keys_limits_and_drain(
    reading_dir: Path, reading_tokenizer: Tokenizer, scripted_node: ScriptedNode, tmp_path: Path
) -> None:
    key = new_key()
    limited = new_key()
    entries = key_entry("alice", key) + key_entry("limited", limited) + "requests_per_minute = 1\n"
    (tmp_path / "keys.toml").write_text(entries)
    goes_on = asyncio.Event()

    async def script(conversation: Conversation) -> None:
        conversation.token(65)
        await goes_on.wait()
        conversation.token(66, finish="length")

    scripted_node.scripts[Client(name="alice", tenant="alice").cache_salt("drain")] = script
    message = {"type": "response.create", "model": MODEL, "input": "Hi", "cache_salt": "drain"}
    flags = ["--decode", scripted_node.address, "--api-keys", str(tmp_path / "keys.toml"), "--max-body-bytes", "100000"]
    with router_process(reading_dir, [*flags, "--drain-grace", "0"]) as router:
        with pytest.raises(InvalidStatus) as caught, socket(router):
            pass
        assert caught.value.response.status_code == 401
        with socket(router, additional_headers={"Authorization": f"Bearer {limited}"}) as opened:
            wrong = {**message, "model": "other"}
            assert [events(opened, wrong)[0]["status"] for _ in range(2)] == [404, 429]
        headers = {"Authorization": f"Bearer {key}"}
        with socket(router, additional_headers=headers) as opened:
            with pytest.raises(ConnectionClosed) as closed:
                events(opened, {**message, "input": "x" * 200_000})
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1009
        with socket(router, additional_headers=headers) as opened, socket(router, additional_headers=headers) as idle:
            opened.send(json.dumps(message))
            opened.recv(timeout=patience(20))
            router.process.send_signal(signal.SIGTERM)
            wait_for(lambda: _refuses(router, headers))
            scripted_node.do(goes_on.set)
            assert events(opened)[-1]["type"] == "response.incomplete"
            for connection in (opened, idle):
                with pytest.raises(ConnectionClosed) as closed:
                    connection.recv(timeout=patience(20))
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1012


def test_turns_over_tls(reading_dir: Path, scripted_node: ScriptedNode, say: Say, tmp_path: Path) -> None:
    ca = trustme.CA()
    cert = tmp_path / "cert.pem"
    key = tmp_path / "key.pem"
    trust = ssl.create_default_context()
    write_https(cert, key, ca)
    ca.configure_trust(trust)
    flags = ["--decode", scripted_node.address, "--tls-cert", str(cert), "--tls-key", str(key)]

    async def take_turns(address: str) -> None:
        url = f"wss://{address}/v1/responses"
        async with connect_tls(
            url, ssl=trust, proxy=None, compression=None, open_timeout=patience(20), close_timeout=1
        ) as opened:
            first = await events_over_tls(opened, json.dumps(say("one")))
            assert text_of(first) == "one"
            last = first[-1]["response"]["id"]
            # More than a record of TLS holds, in both directions.
            long = json.dumps(say("fox " * 5000, previous_response_id=last)) + " " * 50_000
            assert text_of(await events_over_tls(opened, long)) == "fox " * 5000

    with router_process(reading_dir, flags) as router:
        asyncio.run(take_turns(router.address))
        with pytest.raises((InvalidHandshake, OSError, EOFError)), socket(router):
            pass


def _refuses(router: RouterProcess, headers: dict[str, str]) -> bool:
    try:
        with socket(router, additional_headers=headers):
            return False
    except (OSError, InvalidHandshake, EOFError, ConnectionClosed):
        return True
