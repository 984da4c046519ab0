"""--sse-keep-alive: streams of slow requests get their status line and signs of life, and failures as events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from machine import patience
from router_process import MODEL, RouterProcess, router_process
from scripted_node import Conversation, ScriptedNode
from websockets.sync.client import connect

from pdserve.pb import pdserve_pb2 as pb
from router.text.tokenizer import Tokenizer

COMMENT = ": keep-alive"
PING = ["event: ping", 'data: {"type":"ping"}']
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}]},
}


class Slow:
    """A script that waits for ``go`` before each of its outputs: tokens, and a failure if there is one."""

    def __init__(self, node: ScriptedNode, tokens: list[int], failure: str = "") -> None:
        self._node = node
        self._tokens = tokens
        self._failure = failure
        self._steps = asyncio.Semaphore(0)

    async def __call__(self, conversation: Conversation) -> None:
        for position, token_id in enumerate(self._tokens):
            await self._steps.acquire()
            last = not self._failure and position == len(self._tokens) - 1
            conversation.token(token_id, finish="length" if last else "")
        await self._steps.acquire()
        if self._failure:
            conversation.fail(pb.Failure.OVERLOADED, self._failure)

    def go(self) -> None:
        self._node.do(self._steps.release)


@pytest.fixture(scope="module")
def router(tokenizer_dir: Path, scripted_node: ScriptedNode) -> Iterator[RouterProcess]:
    """One request runs and one waits."""
    flags = ["--decode", scripted_node.address, "--migrations", "0", "--max-inflight", "1", "--max-queue", "1"]
    with router_process(tokenizer_dir, [*flags, "--sse-keep-alive", "0.1", "--response-store", "memory"]) as process:
        yield process


@pytest.fixture(scope="module")
def client(router: RouterProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=router.url, timeout=patience(20), trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def sdk(router: RouterProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{router.url}/v1", api_key="x", max_retries=0, timeout=patience(20))


@pytest.fixture
def slow(
    request: pytest.FixtureRequest, scripted_node: ScriptedNode, tokenizer_dir: Path
) -> Callable[..., tuple[Slow, dict[str, Any]]]:
    """Register a script; return it with the fields of a body that selects it."""
    tokenizer = Tokenizer.load(tokenizer_dir)

    def register(text: str = "ab", failure: str = "", name: str = "") -> tuple[Slow, dict[str, Any]]:
        salt = request.node.name + name
        script = Slow(scripted_node, tokenizer.encode(text), failure)
        scripted_node.scripts[salt] = script
        return script, {"model": MODEL, "cache_salt": salt, "stream": True}

    return register


def limit(path: str, tokens: int = 50) -> dict[str, int]:
    return {"max_output_tokens" if path == "/v1/responses" else "max_tokens": tokens}


def sign_of(path: str) -> list[str]:
    return PING if path == "/v1/messages" else [COMMENT]


@contextmanager
def lines_of(client: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[Iterator[str]]:
    with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        yield response.iter_lines()


def after_sign(lines: Iterator[str], path: str) -> None:
    """Read up to the end of a sign of life, and fail at anything else."""
    assert [next(lines) for _ in sign_of(path)] == sign_of(path)
    assert next(lines) == ""


def without_signs(lines: list[str], path: str) -> list[str]:
    text = "\n".join(lines)
    return [line for line in text.replace("\n".join(sign_of(path)), "").splitlines() if line]


@pytest.mark.parametrize("path", BODIES)
def test_silent_stream_shows_signs_of_life(client: httpx.Client, slow: Any, path: str) -> None:
    script, fields = slow()
    body = {**BODIES[path], **fields, **limit(path)}
    with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        for _ in range(2):  # before the first token
            after_sign(lines, path)
        script.go()
        while '"a"' not in next(lines):
            pass
        while next(lines) != sign_of(path)[0]:  # before the second one
            pass
        script.go()
        script.go()
        rest = list(lines)
    assert '"b"' in "".join(rest)


@pytest.mark.parametrize("path", BODIES)
def test_failure_after_a_sign_of_life_is_an_error_event(client: httpx.Client, slow: Any, path: str) -> None:
    script, fields = slow("", failure="no room")
    body = {**BODIES[path], **fields, **limit(path)}
    with client.stream("POST", path, json=body) as response:
        lines = response.iter_lines()
        after_sign(lines, path)
        script.go()
        rest = without_signs(list(lines), path)
    last = json.loads(rest[-1].removeprefix("data: "))
    match path:
        case "/v1/messages":
            assert rest[-2] == "event: error"
            assert (last["type"], last["error"]) == ("error", {"type": "overloaded_error", "message": "no room"})
        case "/v1/responses":
            kinds = [line for line in rest if line.startswith("event: ")]
            assert kinds == [f"event: response.{name}" for name in ("created", "in_progress", "failed")]
            assert (last["response"]["status"], last["response"]["error"]["message"]) == ("failed", "no room")
        case _:
            assert (last["error"]["type"], last["error"]["message"]) == ("overloaded_error", "no room")
            assert len(rest) == 1


def test_sdk_raises_the_error_of_a_late_failure(sdk: openai.OpenAI, slow: Any) -> None:
    script, fields = slow("", failure="no room")
    stream = sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        extra_body={"cache_salt": fields["cache_salt"]},
    )  # returns with the status line, before any output
    script.go()
    with pytest.raises(openai.APIError, match="no room"):
        list(stream)


def test_sdk_skips_signs_of_life(sdk: openai.OpenAI, slow: Any) -> None:
    script, fields = slow("abc")
    extra = {"cache_salt": fields["cache_salt"]}
    events = sdk.responses.create(model=MODEL, input="Hi", stream=True, extra_body=extra)
    for _ in range(4):
        script.go()
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete")
    assert kinds.count("response.output_text.delta") == 3


@pytest.mark.parametrize("path", BODIES)
def test_waiting_stream_shows_signs_of_life(client: httpx.Client, slow: Any, path: str) -> None:
    first, running = slow(name="first")
    second, waiting = slow(name="second")
    body = {**BODIES[path], **limit(path)}
    with lines_of(client, path, {**body, **running}) as ahead:
        after_sign(ahead, path)
        with lines_of(client, path, {**body, **waiting}) as behind:
            for _ in range(2):
                after_sign(behind, path)
            assert "pdserve_requests_waiting 1.0" in client.get("/metrics").text
            for script in (first, second):
                for _ in range(3):
                    script.go()
            texts = ["".join(ahead), "".join(behind)]
    assert all('"a"' in text and '"b"' in text for text in texts)


def test_request_that_loses_its_place_ends_with_an_event_or_a_status(client: httpx.Client, slow: Any) -> None:
    path = "/v1/completions"
    running, waiting, preferred = (slow(name=name)[1] | {"prompt": "Hi"} for name in ("first", "second", "third"))
    with lines_of(client, path, running) as ahead:
        after_sign(ahead, path)
        with lines_of(client, path, waiting) as behind:
            after_sign(behind, path)
            with lines_of(client, path, preferred | {"priority": -1}) as third:
                after_sign(third, path)
                lost = without_signs(list(behind), path)
                refused = client.post(path, json=waiting)  # the queue is full
    assert [json.loads(line.removeprefix("data: "))["error"]["type"] for line in lost] == ["overloaded_error"]
    assert refused.status_code == 503
    assert "retry-after" in refused.headers


def test_bad_requests_of_streams_have_a_status(client: httpx.Client, slow: Any) -> None:
    _, fields = slow()
    for change, status in (({"max_tokens": "many"}, 400), ({"model": "other"}, 404), ({"max_tokens": 10**6}, 400)):
        response = client.post("/v1/completions", json={"prompt": "Hi", **fields, **change})
        assert (response.status_code, response.headers["content-type"]) == (status, "application/json")


def test_background_streams_show_signs_of_life(client: httpx.Client, slow: Any) -> None:
    script, fields = slow()
    url = "/v1/responses"
    with client.stream("POST", url, json={"input": "Hi", **fields, "background": True}) as response:
        lines = response.iter_lines()
        while not (line := next(lines)).startswith("data: "):
            pass
        while next(lines) != COMMENT:
            pass
    name = json.loads(line.removeprefix("data: "))["response"]["id"]
    with client.stream("GET", f"{url}/{name}", params={"stream": "true", "starting_after": 1}) as again:
        lines = again.iter_lines()
        after_sign(lines, "/v1/responses")
        for _ in range(3):
            script.go()
        assert '"response.incomplete"' in "".join(lines)


def test_sockets_get_events_only(router: RouterProcess, slow: Any) -> None:
    script, fields = slow("", failure="no room")
    message = {"type": "response.create", "input": "Hi", "cache_salt": fields["cache_salt"], "model": MODEL}
    with connect(f"ws://{router.address}/v1/responses", proxy=None, compression=None) as socket:
        socket.send(json.dumps(message))
        with pytest.raises(TimeoutError):
            socket.recv(timeout=0.4)
        script.go()
        event = json.loads(socket.recv(timeout=patience(20)))
    assert (event["type"], event["status"], event["error"]["message"]) == ("error", 503, "no room")
