"""Streams, stop strings, cancellation and failures: a real router with a scripted node."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import small_tokenizers
from machine import patience
from router_process import router_process
from scripted_node import Conversation, Script, ScriptedNode

from pdserve.pb import pdserve_pb2 as pb
from router.text.tokenizer import Tokenizer

FAILURES = [
    (pb.Failure.INVALID, 400, "invalid_request_error"),
    (pb.Failure.OVERLOADED, 503, "overloaded_error"),
    (pb.Failure.DEADLINE, 504, "timeout_error"),
    (pb.Failure.NODE_FAILED, 502, "node_error"),
    (pb.Failure.UNSPECIFIED, 502, "node_error"),
]

HELLO = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_dir)


@pytest.fixture
def play(request: pytest.FixtureRequest, scripted_node: ScriptedNode) -> Callable[[Script], dict[str, Any]]:
    """Register a script and return a body that selects it."""

    def register(script: Script) -> dict[str, Any]:
        salt = request.node.name
        scripted_node.scripts[salt] = script
        return {"prompt": "Hello", "cache_salt": salt, "max_tokens": 900}

    return register


def events(response: httpx.Response) -> Iterator[Any]:
    """Data of server-sent events; [DONE] as that string."""
    for line in response.iter_lines():
        if line:
            data = line.removeprefix("data: ")
            assert data != line, line
            yield data if data == "[DONE]" else json.loads(data)


def stream(client: httpx.Client, body: dict[str, Any], path: str = "/v1/completions") -> list[Any]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events(response))


def saying(token_ids: list[int], finish: str = "length") -> Script:
    async def script(conversation: Conversation) -> None:
        for position, token_id in enumerate(token_ids):
            conversation.token(token_id, finish=finish if position == len(token_ids) - 1 else "")

    return script


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("code", "status", "kind"), FAILURES)
def test_failure_before_the_first_token_sets_the_status(
    client: httpx.Client, play: Any, code: Any, status: int, kind: str, streaming: bool
) -> None:
    async def script(conversation: Conversation) -> None:
        conversation.fail(code, "no room", retry_after_ms=2500)

    response = client.post("/v1/completions", json={**play(script), "stream": streaming})
    assert response.status_code == status
    assert response.json()["error"]["type"] == kind
    assert response.json()["error"]["message"] == "no room"
    assert response.headers.get("retry-after") == ("3" if status == 503 else None)


def test_failure_in_a_stream_is_an_error_event_without_done(
    client: httpx.Client, play: Any, tokenizer: Tokenizer
) -> None:
    async def script(conversation: Conversation) -> None:
        conversation.token(tokenizer.encode("a")[0])
        conversation.fail(pb.Failure.NODE_FAILED, "the engine died")

    received = stream(client, play(script))
    assert received[0]["choices"][0]["text"] == "a"
    assert received[-1]["error"]["message"] == "the engine died"
    assert "[DONE]" not in received


def test_late_failure_without_streaming_sets_the_status(client: httpx.Client, play: Any, tokenizer: Tokenizer) -> None:
    async def script(conversation: Conversation) -> None:
        conversation.token(tokenizer.encode("a")[0])
        conversation.fail(pb.Failure.NODE_FAILED, "the engine died")

    assert client.post("/v1/completions", json=play(script)).status_code == 502


def test_status_line_waits_for_the_first_token(client: httpx.Client, play: Any, scripted_node: ScriptedNode) -> None:
    go = asyncio.Event()

    async def script(conversation: Conversation) -> None:
        await go.wait()
        conversation.fail(pb.Failure.OVERLOADED)

    body = {**play(script), "stream": True}
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=body, timeout=0.3)
    go.set()


def test_stop_string_ends_the_text_and_cancels_the_request(
    client: httpx.Client, play: Any, tokenizer: Tokenizer, scripted_node: ScriptedNode
) -> None:
    async def script(conversation: Conversation) -> None:
        for token_id in tokenizer.encode("one two STOP three"):
            conversation.token(token_id)
        await conversation.cancelled.wait()

    body = {**play(script), "stop": ["nothing", "STOP"]}
    received = stream(client, body)
    assert "".join(chunk["choices"][0]["text"] for chunk in received[:-1]) == "one two "
    assert received[-2]["choices"][0]["finish_reason"] == "stop"
    assert received[-1] == "[DONE]"
    scripted_node.wait_cancelled(body["cache_salt"])
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one two ", "stop")


def test_request_ends_with_its_last_choice(
    client: httpx.Client, play: Any, tokenizer: Tokenizer, scripted_node: ScriptedNode
) -> None:
    async def script(conversation: Conversation) -> None:
        first, *more = tokenizer.encode("more")
        conversation.token(first, choice=1)
        for token_id in tokenizer.encode("xSTOPy"):
            conversation.token(token_id, choice=0)
        for token_id in more:
            conversation.token(token_id, choice=1)
        assert not conversation.cancelled.is_set()
        conversation.token(tokenizer.encode("!")[0], choice=1, finish="length")

    body = {**play(script), "stop": "STOP", "n": 2}
    choices = client.post("/v1/completions", json=body).json()["choices"]
    assert [(c["index"], c["text"], c["finish_reason"]) for c in choices] == [(0, "x", "stop"), (1, "more!", "length")]
    scripted_node.wait_cancelled(body["cache_salt"])


def test_chunks_hold_whole_characters(client: httpx.Client, play: Any, tokenizer: Tokenizer) -> None:
    text = "日本語 🙂👩‍👩‍👧 ünï €"
    received = stream(client, play(saying(tokenizer.encode(text))))
    texts = [chunk["choices"][0]["text"] for chunk in received[:-1]]
    assert "".join(texts) == text
    assert len(texts) > 5
    assert not any("\ufffd" in piece for piece in texts)


def test_stop_token_has_no_text(client: httpx.Client, play: Any, tokenizer: Tokenizer) -> None:
    body = play(saying(tokenizer.encode("ab!"), finish="stop"))
    choice = client.post("/v1/completions", json={**body, "return_token_ids": True}).json()["choices"][0]
    assert choice["text"] + "!" == "ab!"
    assert choice["token_ids"] == tokenizer.encode("ab!")


@pytest.mark.parametrize("streaming", [False, True])
def test_disconnect_cancels_the_request(
    client: httpx.Client, play: Any, tokenizer: Tokenizer, scripted_node: ScriptedNode, streaming: bool
) -> None:
    async def script(conversation: Conversation) -> None:
        while not conversation.cancelled.is_set():
            conversation.token(tokenizer.encode("a")[0])
            await asyncio.sleep(0.01)

    body = {**play(script), "stream": streaming}
    if streaming:
        with client.stream("POST", "/v1/completions", json=body) as response:
            next(events(response))
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=body, timeout=0.3)
    scripted_node.wait_cancelled(body["cache_salt"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello", "logprobs": 20}),
        ("/v1/chat/completions", {"messages": [HELLO], "logprobs": True, "top_logprobs": 20}),
        ("/v1/responses", {"input": [HELLO], "top_logprobs": 20, "include": ["message.output_text.logprobs"]}),
    ],
)
def test_request_is_paused_while_its_client_does_not_read(
    client: httpx.Client,
    play: Any,
    tokenizer: Tokenizer,
    scripted_node: ScriptedNode,
    path: str,
    body: dict[str, Any],
) -> None:
    """Tokens under way still arrive, and the client gets all of them."""
    token_id = tokenizer.encode("a")[0]
    logprobs = pb.TokenLogprobs(logprob=-1.0, top_ids=[token_id] * 20, top_logprobs=[-1.0] * 20)  # some 2 KB of JSON
    num_sent = 0
    was_paused = asyncio.Event()

    async def script(conversation: Conversation) -> None:
        nonlocal num_sent
        while not conversation.paused:
            for _ in range(10):
                conversation.token(token_id, logprobs=logprobs)
                num_sent += 1
            await asyncio.sleep(0.005)
        was_paused.set()
        while conversation.paused:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        conversation.token(token_id, logprobs=logprobs, finish="length")

    salt = {"cache_salt": play(script)["cache_salt"], "stream": True}
    with client.stream("POST", path, json={**body, **salt}) as response:
        scripted_node.call(asyncio.wait_for(was_paused.wait(), 20.0))
        text = response.read().decode()
    assert text.count("data: {") > num_sent


def test_stream_ends_with_finish_reason_and_usage(client: httpx.Client, play: Any, tokenizer: Tokenizer) -> None:
    body = play(saying(tokenizer.encode("abc")))
    options = {"include_usage": True, "continuous_usage_stats": True}
    received = stream(client, {**body, "stream_options": options})
    *chunks, usage, done = received
    assert done == "[DONE]"
    prompt_tokens = len(tokenizer.encode("Hello"))
    num_tokens = len(tokenizer.encode("abc"))
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == num_tokens
    assert usage["usage"]["total_tokens"] == prompt_tokens + num_tokens
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == list(range(1, num_tokens + 1))
    assert stream(client, {**body, "stream_options": {"include_usage": True}})[0]["usage"] is None
    assert "usage" not in stream(client, body)[0]


def test_every_chunk_of_a_chat_has_usage_if_asked_for(client: httpx.Client, play: Any, tokenizer: Tokenizer) -> None:
    body = play(saying(tokenizer.encode("abc")))
    del body["prompt"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = stream(client, {**body, "messages": [HELLO], "stream_options": options}, path="/v1/chat/completions")
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"return_token_ids": True}], ids=str)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_of_chunks_never_falls(
    client: httpx.Client, play: Any, tokenizer: Tokenizer, path: str, fields: dict[str, Any]
) -> None:
    """Also where a choice begins after tokens of another one."""
    token_ids = tokenizer.encode("abc")

    async def script(conversation: Conversation) -> None:
        for choice in (0, 1):
            for number, token_id in enumerate(token_ids, 1):
                logprobs = pb.TokenLogprobs(logprob=-1.0) if "logprobs" in fields else None
                finish = "length" if number == len(token_ids) else ""
                conversation.token(token_id, choice, finish, logprobs=logprobs)

    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**play(script), **fields, "n": 2, "stream_options": options}
    if path.endswith("/chat/completions"):
        del body["prompt"]
        body["messages"] = [HELLO]
    else:
        body |= {"logprobs": 1} if "logprobs" in fields else {"echo": True}
    *chunks, last, _ = stream(client, body, path)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 2 * len(token_ids)


def test_chat_stream_opens_with_the_role(client: httpx.Client, play: Any, tokenizer: Tokenizer) -> None:
    body = play(saying(tokenizer.encode("hey")))
    del body["prompt"]
    received = stream(client, {**body, "messages": [{"role": "user", "content": "hi"}]}, path="/v1/chat/completions")
    deltas = [chunk["choices"][0]["delta"] for chunk in received[:-1]]
    assert deltas[0] == {"role": "assistant", "content": "", "reasoning_content": None}
    assert all("reasoning_content" in delta for delta in deltas), "clients read it without asking whether it is there"
    assert "".join(delta.get("content", "") for delta in deltas) == "hey"
    assert {chunk["object"] for chunk in received[:-1]} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in received[:-1]}) == 1


def test_null_content_is_an_empty_text(
    client: httpx.Client, play: Any, scripted_node: ScriptedNode, tokenizer: Tokenizer
) -> None:
    body = play(saying(tokenizer.encode("hey")))
    del body["prompt"]
    prompts = []
    for content in (None, ""):
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}, HELLO]
        assert client.post("/v1/chat/completions", json={**body, "messages": messages}).status_code == 200
        prompts.append(scripted_node.seen[body["cache_salt"]].prompt)
    assert prompts[0] == prompts[1]


def test_requests_without_seed_get_different_seeds(
    client: httpx.Client, play: Any, scripted_node: ScriptedNode, tokenizer: Tokenizer
) -> None:
    body = play(saying(tokenizer.encode("a")[:1]))
    seeds = set()
    for _ in range(3):
        client.post("/v1/completions", json=body)
        seeds.add(scripted_node.seen[body["cache_salt"]].message.sampling.seed)
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    client.post("/v1/completions", json={**body, "seed": -1})
    assert scripted_node.seen[body["cache_salt"]].message.sampling.seed == 2**64 - 1


def test_sampling_parameters_reach_the_node(
    client: httpx.Client, play: Any, scripted_node: ScriptedNode, tokenizer: Tokenizer
) -> None:
    body = play(saying(tokenizer.encode("a")[:1]))
    sent = {
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 42,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "ignore_eos": True,
    }
    extra = {"logit_bias": {"5": -100}, "stop_token_ids": [3, 4], "logprobs": 2, "user": "me", "metadata": {"a": "b"}}
    assert client.post("/v1/completions", json={**body, **sent, **extra}).status_code == 200
    message = scripted_node.seen[body["cache_salt"]].message
    assert {name: getattr(message.sampling, name) for name in sent} == sent
    assert dict(message.sampling.logit_bias) == {5: -100.0}
    assert list(message.sampling.stop_token_ids) == [3, 4]
    assert message.sampling.logprobs == 2
    assert 0 < message.timeout_ms <= 20_000


def test_logprobs_of_completions_and_chats(client: httpx.Client, play: Any, tokenizer: Tokenizer) -> None:
    smile = tokenizer.encode("🙂", add_special_tokens=False)
    top_ids = [smile[0], 7]
    top_logprobs = [-0.5, float("-inf")]

    async def script(conversation: Conversation) -> None:
        num_top = conversation.message.sampling.logprobs
        logprobs = pb.TokenLogprobs(logprob=-0.5, top_ids=top_ids[:num_top], top_logprobs=top_logprobs[:num_top])
        for position, token_id in enumerate(smile):
            finish = "length" if position == len(smile) - 1 else ""
            conversation.token(token_id, finish=finish, logprobs=logprobs)

    body = play(script)
    choice = client.post("/v1/completions", json={**body, "logprobs": 2}).json()["choices"][0]
    assert choice["text"] == "🙂"
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * len(smile)
    assert choice["logprobs"]["text_offset"] == [0] * len(smile)
    assert choice["logprobs"]["tokens"][0].startswith("bytes:\\xf0")
    assert -9999.0 in choice["logprobs"]["top_logprobs"][0].values()

    del body["prompt"]
    chat = {**body, "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1}
    content = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "🙂"
    assert [len(entry["top_logprobs"]) for entry in content] == [1] * len(smile)
    received = stream(client, chat, path="/v1/chat/completions")
    streamed = [e for c in received[:-1] if (lp := c["choices"][0]["logprobs"]) for e in lp["content"]]
    assert streamed == content


def test_stream_beyond_its_timeout_ends_with_an_error(
    tokenizer_dir: Path, scripted_node: ScriptedNode, play: Any, tokenizer: Tokenizer
) -> None:
    async def script(conversation: Conversation) -> None:
        conversation.token(tokenizer.encode("a")[0])
        await conversation.cancelled.wait()

    body = play(script)
    with (
        router_process(tokenizer_dir, ["--decode", scripted_node.address, "--request-timeout", "1"]) as process,
        httpx.Client(base_url=process.url, trust_env=False, timeout=patience(20)) as client,
    ):
        assert stream(client, body)[-1]["error"]["type"] == "timeout_error"
        assert client.post("/v1/completions", json=body).status_code == 504
    scripted_node.wait_cancelled(body["cache_salt"])


def test_lost_node_fails_its_requests_and_is_used_after_its_restart(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    node = ScriptedNode("small")
    token_id = tokenizer.encode("a")[0]

    async def forever(conversation: Conversation) -> None:
        while True:
            conversation.token(token_id)
            await asyncio.sleep(0.01)

    node.scripts = {"forever": forever, "one": saying([token_id])}
    try:
        with (
            router_process(tokenizer_dir, ["--decode", node.address, "--migrations", "0"]) as process,
            httpx.Client(base_url=process.url, trust_env=False, timeout=patience(20)) as client,
        ):
            body = {"prompt": "x", "stream": True, "cache_salt": "forever", "max_tokens": 900}
            with client.stream("POST", "/v1/completions", json=body) as response:
                received = []
                for event in events(response):
                    received.append(event)
                    if len(received) == 3:
                        node.stop()
            assert received[-1]["error"]["type"] == "node_error"
            _wait_for(lambda: client.get("/health").status_code == 503)
            assert client.post("/v1/completions", json=body).status_code == 503
            node.description.epoch = "2"
            node.start()
            _wait_for(lambda: client.get("/health").status_code == 200)
            body = {"prompt": "x", "cache_salt": "one"}
            assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "a"
    finally:
        node.close()


def test_requests_beyond_the_limit_are_refused(
    tokenizer_dir: Path, scripted_node: ScriptedNode, play: Any, tokenizer: Tokenizer
) -> None:
    async def script(conversation: Conversation) -> None:
        conversation.token(tokenizer.encode("a")[0])
        await conversation.cancelled.wait()

    body = {**play(script), "stream": True}
    flags = ["--decode", scripted_node.address, "--max-inflight", "1", "--max-queue", "0"]
    flags += ["--sse-keep-alive", "0.5"]  # the router sees within 0.5 s that the client has left
    with (
        router_process(tokenizer_dir, flags) as process,
        httpx.Client(base_url=process.url, trust_env=False, timeout=patience(20)) as client,
    ):
        with client.stream("POST", "/v1/completions", json=body) as response:
            received = events(response)  # dropping it would close the connection
            next(received)
            refused = httpx.post(f"{process.url}/v1/completions", json=body, trust_env=False, timeout=patience(20))
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert "limit is 0" in refused.json()["error"]["message"]
        _wait_for(lambda: "pdserve_requests_in_flight 0.0" in client.get("/metrics").text)


def _wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)


def test_tokenizer_without_byte_table_streams(tmp_path: Path, scripted_node: ScriptedNode, play: Any) -> None:
    directory = small_tokenizers.write(tmp_path, small_tokenizers.byte_fallback())
    tokenizer = Tokenizer.load(directory)
    text = "Hello 日本 🙂 world"
    body = play(saying(tokenizer.encode(text, add_special_tokens=False)))
    with (
        router_process(directory, ["--decode", scripted_node.address]) as process,
        httpx.Client(base_url=process.url, trust_env=False, timeout=patience(20)) as client,
    ):
        received = stream(client, {**body, "prompt": [1]})
        assert "".join(chunk["choices"][0]["text"] for chunk in received[:-1]) == text
        assert client.post("/v1/chat/completions", json={"messages": [{"role": "user"}]}).status_code == 400


def test_ended_choices_are_counted_by_their_reason(client: httpx.Client, play: Any, tokenizer: Tokenizer) -> None:
    def counted() -> dict[str, float]:
        lines = client.get("/metrics").text.splitlines()
        series = [line for line in lines if line.startswith("vllm:request_success_total{")]
        return {reason: float(line.split()[-1]) for line in series for reason in ("stop", "length") if reason in line}

    before = counted()
    body = play(saying(tokenizer.encode("abSTOP")))
    client.post("/v1/completions", json={**body, "stop": "STOP"})
    for streamed in (False, True):
        client.post("/v1/completions", json={**body, "stream": streamed})
    assert counted() == {"stop": before["stop"] + 1, "length": before["length"] + 2}
