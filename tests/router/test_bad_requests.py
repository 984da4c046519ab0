"""Invalid requests get a status, a message and the name of the field."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_process import MODEL
from scripted_node import Conversation, ScriptedNode

from pdserve.errors import RequestError
from pdserve.rpc.protobuf import pack_tokens
from router.completions_api.generate_body import GenerateBody
from router.completions_api.jobs import make_job
from router.completions_api.request_bodies import ChatBody, CompletionBody, parse_chat, parse_completion
from router.fleet.fleet import ModelLimits
from router.text.prompt import Prompt

LIMIT = 1000  # max_model_len of the scripted node
VOCABULARY = 506

COMPLETIONS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": 5}, "prompt", "expected str"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "0 tokens"),
    ({"prompt": ""}, "prompt", "0 tokens"),
    ({"prompt": ["a", [1]]}, "prompt", "only one"),
    ({"prompt": [1, "a"]}, "prompt", "only one"),
    ({"prompt": ["a", 1]}, "prompt", "only one"),
    ({"prompt": [[1], "a"]}, "prompt", "only one"),
    ({"prompt": [[1], 2]}, "prompt", "only one"),
    ({"prompt": [[1, "a"]]}, "prompt", "expected int"),
    ({"prompt": [VOCABULARY]}, "prompt", "506 is outside the vocabulary 0 … 505"),
    ({"prompt": [-1]}, "prompt", "-1 is outside"),
    ({"prompt": [1, 2**32]}, "prompt", "4294967296 is outside"),
    ({"prompt": [2**32 - 1]}, "prompt", "4294967295 is outside the vocabulary 0 … 505"),
    ({"prompt": [10**30]}, "prompt", "outside"),
    ({"prompt": [1], "max_tokens": 0}, "max_tokens", "at least 1"),
    ({"prompt": [1], "max_tokens": 1.5}, "max_tokens", "expected int"),
    ({"prompt": [1], "max_tokens": "9"}, "max_tokens", "expected int"),
    ({"prompt": [1, 2], "max_tokens": 10**12}, "max_tokens", "prompt 2 tokens + max_tokens 1000000000000 > limit 1000"),
    ({"prompt": [1] * 1000}, "prompt", "prompt 1000 tokens + max_tokens 1 > limit 1000"),
    ({"prompt": [1], "min_tokens": 20}, "min_tokens", "exceeds max_tokens 16"),
    ({"prompt": [1], "temperature": -0.1}, "temperature", "at least 0"),
    ({"prompt": [1], "temperature": 2.1}, "temperature", "at most 2"),
    ({"prompt": [1], "top_p": -0.1}, "top_p", "above 0"),
    ({"prompt": [1], "max_tokens": 4.5}, "max_tokens", "expected int"),
    ({"prompt": [1], "top_k": -2}, "top_k", "at least -1"),
    ({"prompt": [1], "min_p": 1.1}, "min_p", "at most 1"),
    ({"prompt": [1], "repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"prompt": [1], "presence_penalty": 3}, "presence_penalty", "at most 2"),
    ({"prompt": [1], "frequency_penalty": -3}, "frequency_penalty", "at least -2"),
    (
        {"prompt": [1], "logit_bias": {"1": 101}},
        "logit_bias",
        "token 1 is 101.0; it must be at least -100",
    ),
    ({"prompt": [1], "logit_bias": {"a": 1}}, "logit_bias", "the key 'a'; it must be a token id"),
    ({"prompt": [1], "logit_bias": {"9999": 1}}, "logit_bias", "9999 is outside"),
    ({"prompt": [1], "stop_token_ids": [9999]}, "stop_token_ids", "9999 is outside"),
    ({"prompt": [1], "stop": [""]}, "stop", "empty"),
    ({"prompt": [1], "stop": ["a"] * 65}, "stop", "at most 64"),
    ({"prompt": [1], "n": 0}, "n", "at least 1"),
    ({"prompt": [1], "n": 129}, "n", "at most 128"),
    ({"prompt": [1], "n": True}, "n", "expected int"),
    ({"prompt": [1], "best_of": 2}, "best_of", "equal n"),
    ({"prompt": [1], "logprobs": 21}, "logprobs", "the limit is 20"),
    ({"prompt": [1], "logprobs": -1}, "logprobs", "-1, all 506 tokens of the vocabulary; the limit is 20"),
    ({"prompt": [1], "logprobs": -1, "echo": True}, "logprobs", "at most 20"),
    ({"prompt": [1], "prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
    ({"prompt": [1], "prompt_logprobs": -1}, "prompt_logprobs", "the limit is 20"),
    ({"prompt": [1], "prompt_logprobs": -2}, "prompt_logprobs", "at least 0"),
    ({"prompt": [1], "bad_words": ["a", ""]}, "bad_words", "empty text"),
    ({"prompt": [1], "bad_words": ["a"] * 1025}, "bad_words", "limit is 1024"),
    ({"prompt": [1], "bad_words": [chr(65 + i) * 900 for i in range(20)]}, "bad_words", "tokens, the limit is 8192"),
    ({"prompt": [1], "bad_words": ["a", "b"], "allowed_token_ids": [65]}, "bad_words", "exclude all"),
    ({"prompt": [1], "allowed_token_ids": [9999]}, "allowed_token_ids", "9999 is outside"),
    ({"prompt": [1], "allowed_token_ids": [1] * 16_385}, "allowed_token_ids", "limit is 16384"),
    ({"prompt": [1], "logprob_token_ids": [9999], "logprobs": 0}, "logprob_token_ids", "9999 is outside"),
    ({"prompt": [1], "logprob_token_ids": [1]}, "logprob_token_ids", "needs logprobs"),
    ({"prompt": [1], "thinking_token_budget": -2}, "thinking_token_budget", "at least -1"),
    ({"prompt": [1], "thinking_token_budget": 1.5}, "thinking_token_budget", "expected int"),
    ({"prompt": [1], "thinking_token_budget": 5}, "thinking_token_budget", "--reasoning-parser"),
    ({"prompt": [1], "request_id": "a b"}, "request_id", "letters, digits"),
    ({"prompt": [1], "regex": ""}, "regex", "empty"),
    ({"prompt": [1], "ebnf": ""}, "ebnf", "empty"),
    ({"prompt": [1], "regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "exclude each other"),
    ({"prompt": [1], "use_beam_search": True}, "use_beam_search", "not supported"),
    ({"prompt": [1], "lora_path": "a"}, "lora_path", "not supported"),
    ({"prompt": [1], "bootstrap_host": "10.0.0.1"}, "bootstrap_host", "not supported"),
    ({"prompt": [1], "kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params", "not supported"),
    ({"prompt": [1], "rid": "a"}, "rid", "use request_id"),
    ({"prompt": [1], "prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "cannot be streamed"),
    ({"prompt": [1], "max_tokens": 0, "echo": True}, "max_tokens", "at least 1"),
    ({"prompt": [1], "max_tokens": 0, "logprobs": 1}, "max_tokens", "at least 1"),
    ({"prompt": [1], "max_tokens": -1, "prompt_logprobs": 1}, "max_tokens", "at least 0"),
    ({"prompt": [1] * 1000, "max_tokens": 0, "prompt_logprobs": 1}, "prompt", "> limit 1000"),
    ({"prompt": [1], "suffix": "x"}, "suffix", "not supported"),
    ({"prompt": [1], "temprature": 1}, "temprature", "did you mean temperature"),
    ({"prompt": [1], "zzzzqq": 1}, "zzzzqq", "unknown parameter zzzzqq"),
    ({"prompt": [1], "seed": 2**70}, "seed", "at most"),
    ({"prompt": [1], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    ({"prompt": [1], "stream_options": {"include_usage": 1}}, "stream_options", "expected bool"),
    ({"prompt": [1], "stream_options": {}}, "stream_options", "needs stream"),
    ({"prompt": [1], "guided_grammar": ""}, "guided_grammar", "empty"),
    ({"prompt": [1], "structured_outputs": {"grammar": " "}}, "structured_outputs", "empty"),
    ({"messages": [{"role": "user", "content": "a"}]}, "messages", "/v1/chat/completions"),
    ({"prompt": [[1]] * 600, "n": 2}, "prompt", "600 prompts × n 2 exceed 1024"),
    ({}, "prompt", "prompt is missing"),
]
CHATS: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "messages", "messages is missing"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": ["hi"]}, "messages", "expected object"),
    ({"messages": [{"content": "x"}]}, "messages[0]", "role"),
    ({"messages": [{"role": "user"}]}, "messages", "chat template"),
    ({"prompt": "Hello"}, "prompt", "send the request there"),
    ({"input": "Hello"}, "input", "/v1/responses"),
    ({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}, "tools[0]", "is missing"),
    (
        {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "yaml"}},
        "response_format",
        "type 'yaml' is not known",
    ),
    ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    (
        {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": -1},
        "top_logprobs",
        "all 506 tokens of the vocabulary; the limit is 20",
    ),
    (
        {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"},
        "chat_template",
        "--trust-request-chat-template",
    ),
    (
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"chat_template": "x"}},
        "chat_template_kwargs",
        "may not set chat_template",
    ),
    ({"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 5000}, "max_tokens", "> limit 1000"),
    ({"messages": [{"role": "user", "content": "a " * 3000}]}, "messages", "> limit 1000"),
    (
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs",
        "may not set messages",
    ),
]


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """Check status and shape of an error response; return the error object."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(("body", "param", "said"), COMPLETIONS)
def test_completions(client: httpx.Client, body: dict[str, Any], param: str | None, said: str) -> None:
    error = refused(client.post("/v1/completions", json=body))
    assert error["param"] == param
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("body", "param", "said"), CHATS)
def test_chat(client: httpx.Client, body: dict[str, Any], param: str | None, said: str) -> None:
    error = refused(client.post("/v1/chat/completions", json=body))
    assert error["param"] == param
    assert said in error["message"]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1]", b"\xff\xfe", b'"\xff"', b'"text"', b'{"prompt": NaN}', b"[" * 100_000]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_broken_json(client: httpx.Client, path: str, data: bytes) -> None:
    assert "JSON" in refused(client.post(path, content=data))["message"]


def test_too_long_prompt_has_openai_code(client: httpx.Client) -> None:
    error = refused(client.post("/v1/completions", json={"prompt": [1], "max_tokens": 1000}))
    assert error["code"] == "context_length_exceeded"


def test_unknown_model_is_404(client: httpx.Client) -> None:
    bodies: dict[str, dict[str, Any]] = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": []}}
    for path, body in bodies.items():
        error = refused(client.post(path, json={"model": "gpt-5", **body}), 404)
        assert error["code"] == "model_not_found"
        assert MODEL in error["message"]
    refused(client.get("/v1/models/gpt-5"), 404)


def test_unknown_paths_and_methods_return_error_objects(client: httpx.Client) -> None:
    assert "did you mean" not in refused(client.get("/v1/nope"), 404)["message"]
    message = refused(client.post("/chat/completions", json={}), 404)["message"]
    assert "did you mean /v1/chat/completions?" in message
    response = client.get("/v1/completions")
    assert refused(response, 405)["message"] == "GET is not allowed at /v1/completions; use POST"
    assert response.headers["allow"] == "POST"
    refused(client.delete("/health"), 405)
    several = client.put("/v1/responses/resp_1")
    refused(several, 405)
    assert several.headers["allow"] == "DELETE, GET"
    assert client.put("/v1/responses/compact").headers["allow"] == "POST"


def test_large_body_is_rejected(client: httpx.Client) -> None:
    body = b'{"prompt": "' + b"a" * (33 * 1024 * 1024) + b'"}'
    error = refused(client.post("/v1/completions", content=body), 413)
    assert str(32 * 1024 * 1024) in error["message"]


def test_null_means_absent(client: httpx.Client, scripted_node: ScriptedNode) -> None:
    async def script(conversation: Conversation) -> None:
        conversation.token(65, finish="length")

    scripted_node.scripts["nulls"] = script
    nulls = dict.fromkeys(("stop", "n", "logprobs", "temperature", "seed", "suffix", "tools", "stream", "user"))
    body: dict[str, Any] = {"prompt": [1], "cache_salt": "nulls", "store": True, "metadata": {}, **nulls}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert scripted_node.seen["nulls"].message.sampling.temperature == 1.0
    assert scripted_node.seen["nulls"].message.sampling.max_tokens == 16


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = sorted({*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__, "tools", "suffix", "x"})


@given(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=6))
def test_any_body_is_parsed_or_rejected(fields: dict[str, Any]) -> None:
    limits = ModelLimits(lengths=(LIMIT,), vocab_size=VOCABULARY)
    parsers: list[Callable[[bytes], GenerateBody]] = [parse_completion, parse_chat]
    for parse in parsers:
        message = ""
        try:
            make_job(Prompt(pack_tokens([1, 2, 3])), parse(json.dumps(fields).encode()), limits)
        except RequestError as exc:
            message = str(exc)
        assert " - at " not in message  # the path as msgspec writes it
        assert message or "prompt" in fields or "messages" in fields


@given(st.integers(1, 1200), st.none() | st.integers(1, 1200), st.booleans())
def test_job_fits_the_model_or_is_rejected(prompt_len: int, max_tokens: int | None, chat: bool) -> None:
    limits = ModelLimits(lengths=(LIMIT,), vocab_size=VOCABULARY)
    body: GenerateBody
    body = ChatBody(messages=[], max_tokens=max_tokens) if chat else CompletionBody(prompt="", max_tokens=max_tokens)
    needed = max_tokens or 1
    if prompt_len + needed > LIMIT:
        with pytest.raises(RequestError, match=rf"prompt {prompt_len} tokens \+ max_tokens {needed} > limit {LIMIT}"):
            make_job(Prompt(pack_tokens([1] * prompt_len)), body, limits)
        return
    job = make_job(Prompt(pack_tokens([1] * prompt_len)), body, limits)
    default = LIMIT - prompt_len if chat else min(16, LIMIT - prompt_len)
    assert job.sampling.max_tokens == (max_tokens or default)


LONG = "y" * 40_000  # a regex that backtracks over it took seconds
TOOL = {"type": "function", "function": {"name": "f"}}


def with_message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a", **fields}]}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": [1], LONG: 1}),
        ("completions", {"prompt": [1], "model": LONG}),
        ("completions", {"prompt": [1], "structured_outputs": {LONG: 1}}),
        ("completions", {"prompt": [1], "structured_outputs": {" - at `$.x" + LONG: 1}}),
        ("completions", {"prompt": [1], "response_format": {"type": LONG}}),
        ("completions", {"prompt": [10**4000]}),
        ("completions", {"prompt": [1], "seed": 10**4000}),
        ("completions", {"prompt": [1], "priority": -(10**4000)}),
        ("completions", {"prompt": [1], "max_tokens": 10**4000}),
        ("completions", {"prompt": [1], "min_tokens": 10**4000}),
        ("completions", {"prompt": [1], "temperature": 10**4000}),
        ("completions", {"prompt": [1], "logit_bias": {"1" * 4000: 1}}),
        ("completions", {"prompt": [1], "stop_token_ids": [10**4000]}),
        ("chat/completions", {**with_message(), "reasoning_effort": LONG}),
        ("chat/completions", {**with_message(), "tool_choice": LONG}),
        ("chat/completions", {**with_message(), "tools": [{"type": LONG}]}),
        ("chat/completions", {**with_message(), "tools": [{"type": [LONG] * 9}]}),
        ("chat/completions", {**with_message(), "tools": [{"type": "function", "function": {"name": LONG}}]}),
        (
            "chat/completions",
            {**with_message(), "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": LONG}}},
        ),
        ("chat/completions", with_message(content=[{"type": LONG}])),
        ("chat/completions", with_message(content=[{"type": {"a": LONG}}])),
        ("responses", {"input": "a", "include": [LONG]}),
        ("responses", {"input": "a", "tools": [{"type": LONG}]}),
        ("responses", {"input": [{"type": LONG}]}),
    ],
)
def test_long_values_are_cut_in_errors(client: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    response = client.post(f"/v1/{path}", content=json_with_long_numbers(fields))
    refused(response, 404 if "model" in fields else 400)
    assert len(response.content) < 2000, response.text[:3000]


def json_with_long_numbers(fields: Any) -> bytes:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(fields).encode()
    finally:
        sys.set_int_max_str_digits(limit)


def test_long_path_is_cut_in_the_error(client: httpx.Client) -> None:
    for path in (f"/v1/models/{LONG}", f"/{LONG}", f"/v1/responses/{LONG}"):
        assert len(client.get(path).content) < 2000


def test_numbers_as_clients_write_them(client: httpx.Client, scripted_node: ScriptedNode) -> None:
    async def script(conversation: Conversation) -> None:
        conversation.token(65, finish="length")

    scripted_node.scripts["numbers"] = script
    body = {"prompt": [1], "cache_salt": "numbers", "max_tokens": 4.0, "top_p": 0, "seed": 7.0, "stop": ["x"] * 64}
    assert client.post("/v1/completions", json=body).status_code == 200
    sampling = scripted_node.seen["numbers"].message.sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.seed) == (4, 1, 7)
