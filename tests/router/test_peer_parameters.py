"""Parameters of vLLM and SGLang beyond OpenAI's, through a router to a node that says what a test wants."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from machine import patience
from router_process import RouterProcess
from scripted_node import Conversation, ScriptedNode

from pdserve.pb import pdserve_pb2 as pb
from router.text.tokenizer import Tokenizer

ASK = [{"role": "user", "content": "Hi"}]
BEGUN = [*ASK, {"role": "assistant", "content": "Once "}]
CONTINUED = {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def reader(reading_router: RouterProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{reading_router.url}/v1", timeout=patience(20), trust_env=False) as client:
        yield client


def whole(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The first choice of every chunk."""
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        data = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    return [json.loads(event)["choices"][0] for event in data]


@pytest.fixture
def say(say_text: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Like ``say_text``, but return the fields of a body."""
    return lambda text, finish="stop": say_text(text, finish)["extra_body"]


@pytest.fixture
def sampling(
    reader: httpx.Client, say: Any, scripted_node: ScriptedNode, request: pytest.FixtureRequest
) -> Callable[..., pb.SamplingParams]:
    """Sends a request and returns the sampling parameters that reach the node."""

    def send(path: str = "/completions", **body: Any) -> pb.SamplingParams:
        whole(reader, path, {**say("x"), "prompt": "Hi", **body} if "messages" not in body else {**say("x"), **body})
        return scripted_node.seen[request.node.name].message.sampling

    return send


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
def test_stop_string_may_belong_to_the_text(reader: httpx.Client, say: Any, name: str) -> None:
    body = {**say("one two three", "length"), "prompt": "Hi", "stop": ["wo t", "z"]}
    assert whole(reader, "/completions", body)["text"] == "one t"
    assert whole(reader, "/completions", {**body, name: True})["text"] == "one two t"
    chunks = streamed(reader, "/completions", {**body, name: True})
    assert "".join(chunk["text"] for chunk in chunks) == "one two t"
    assert chunks[-1]["finish_reason"] == "stop"


def test_stop_token_may_belong_to_the_text(
    reader: httpx.Client, scripted_node: ScriptedNode, reading_tokenizer: Tokenizer, request: pytest.FixtureRequest
) -> None:
    ids = reading_tokenizer.encode("ab", add_special_tokens=False)

    async def script(conversation: Conversation) -> None:
        for position, token_id in enumerate(ids):
            conversation.token(token_id, finish="stop" if position == len(ids) - 1 else "")

    scripted_node.scripts[request.node.name] = script
    body = {"prompt": "Hi", "cache_salt": request.node.name, "stop_token_ids": ids[-1:]}
    without = whole(reader, "/completions", body)["text"]
    assert whole(reader, "/completions", {**body, "include_stop_str_in_output": True})["text"] == "ab"
    assert "ab".startswith(without)
    assert without != "ab"


@pytest.mark.parametrize(
    ("fields", "end", "reason", "matched"),
    [
        ({"stop": ["wo t"]}, "length", "wo t", "wo t"),
        ({"stop_token_ids": [-1]}, "stop", -1, -1),  # the last token's id
        ({}, "stop", None, -1),  # EOS
        ({}, "length", None, None),
    ],
)
@pytest.mark.parametrize("prompt", [{"prompt": "Hi"}, {"messages": ASK}, {"messages": ASK, "tools": [TOOL]}])
def test_choice_says_what_stopped_it(
    reader: httpx.Client,
    say: Any,
    reading_tokenizer: Tokenizer,
    fields: Any,
    end: str,
    reason: Any,
    matched: Any,
    prompt: Any,
) -> None:
    last = reading_tokenizer.encode("<|im_end|>")[0]
    if "stop_token_ids" in fields:
        fields = {"stop_token_ids": [last]}
    body = {**say("one two three", end), **prompt, **fields}
    path = "/chat/completions" if "messages" in prompt else "/completions"
    expected = tuple(last if value == -1 else value for value in (reason, matched))
    for choice in (whole(reader, path, body), streamed(reader, path, body)[-1]):
        assert (choice["stop_reason"], choice["matched_stop"]) == expected


def test_bad_words_are_tokenized_alone_and_behind_a_space(sampling: Any, reading_tokenizer: Tokenizer) -> None:
    words = [list(word.token_ids) for word in sampling(bad_words=["the", " fox"]).bad_words]
    texts = ["the", " the", "fox", " fox"]
    assert words == [reading_tokenizer.encode(text, add_special_tokens=False) for text in texts]


def test_token_ids_reach_the_node(sampling: Any) -> None:
    params = sampling(allowed_token_ids=[5, 7, 5], logprobs=1, logprob_token_ids=[9, 8, 9])
    assert list(params.allowed_token_ids) == [5, 7]
    assert (params.logprobs, list(params.logprob_token_ids)) == (2, [9, 8])
    assert sampling(logprobs=-1).logprobs == 506, "all tokens"


@pytest.mark.parametrize(
    ("fields", "budget", "start"),
    [
        ({"messages": ASK}, 5, "<think>"),
        ({"prompt": "Hi"}, 5, "<think>"),
        ({"prompt": "Hi<think>\n"}, 5, ""),
        ({"messages": [*ASK, {"role": "assistant", "content": "<think>a"}], "continue_final_message": True}, 5, ""),
        ({"messages": ASK, "reasoning_effort": "none"}, 0, ""),  # the prompt has ended the reasoning
    ],
)
def test_budget_of_reasoning_counts_from_its_beginning(
    sampling: Any, reading_tokenizer: Tokenizer, fields: dict[str, Any], budget: int, start: str
) -> None:
    params = sampling(
        "/chat/completions" if "messages" in fields else "/completions", **fields, thinking_token_budget=5
    )
    end = "</think>" if budget else ""
    assert params.thinking_token_budget == budget
    assert list(params.thinking_start_ids) == reading_tokenizer.encode(start, add_special_tokens=False)
    assert list(params.thinking_end_ids) == reading_tokenizer.encode(end, add_special_tokens=False)
    assert not sampling(prompt="Hi", thinking_token_budget=-1).thinking_end_ids


@pytest.mark.parametrize(("choice", "marker"), [("auto", "<tool_call>"), ("required", ""), ("none", "")])
def test_a_call_ends_the_budget_of_reasoning(
    sampling: Any, reading_tokenizer: Tokenizer, choice: str, marker: str
) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    fields = {"messages": ASK, "tools": tools, "tool_choice": choice}
    params = sampling("/chat/completions", **fields, thinking_token_budget=5)
    ids = [reading_tokenizer.encode(marker, add_special_tokens=False)] if marker else []
    assert [list(call.token_ids) for call in params.thinking_call_ids] == ids


@pytest.mark.parametrize(
    ("name", "value", "same"),
    [
        ("regex", "[a-c]+", "guided_regex"),
        ("ebnf", 'root ::= "a" | "b"', "guided_grammar"),
        ("json_schema", '{"type": "object"}', "guided_json"),
    ],
)
def test_grammars_of_sglang(sampling: Any, name: str, value: str, same: str) -> None:
    grammar = sampling(**{same: value}).grammar
    assert grammar
    assert sampling(**{name: value}).grammar == grammar


def test_tokens_are_shown_as_their_ids(
    reader: httpx.Client, scripted_node: ScriptedNode, request: pytest.FixtureRequest
) -> None:
    async def script(conversation: Conversation) -> None:
        num_top = conversation.message.sampling.logprobs
        logprobs = pb.TokenLogprobs(logprob=-1.0, top_ids=[70, 80][:num_top], top_logprobs=[-0.5, -2.0][:num_top])
        conversation.token(75, finish="length", logprobs=logprobs)

    scripted_node.scripts[request.node.name] = script
    shown = {"cache_salt": request.node.name, "return_tokens_as_token_ids": True}
    body = {**shown, "prompt": "Hi", "logprobs": 2}
    top = {"token_id:70": -0.5, "token_id:80": -2.0, "token_id:75": -1.0}
    for logprobs in (
        whole(reader, "/completions", body)["logprobs"],
        streamed(reader, "/completions", body)[-1]["logprobs"],
    ):
        assert (logprobs["tokens"], logprobs["top_logprobs"]) == (["token_id:75"], [top])
    chat = {**shown, "messages": ASK, "logprobs": True, "top_logprobs": 1}
    (entry,) = whole(reader, "/chat/completions", chat)["logprobs"]["content"]
    assert entry["token"] == "token_id:75"
    (best,) = entry["top_logprobs"]
    assert best["token"] == "token_id:70"
    texts = whole(reader, "/chat/completions", {**chat, "return_tokens_as_token_ids": False})["logprobs"]["content"][0]
    assert [entry["bytes"], best["bytes"]] == [texts["bytes"], texts["top_logprobs"][0]["bytes"]]


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["plain", "parsed"])
def test_chat_echoes_the_message_that_it_continues(reader: httpx.Client, say: Any, tools: list[Any]) -> None:
    body = {**say("upon a time"), "tools": tools, **CONTINUED}
    if not tools:
        body["reasoning_effort"] = "none"
    assert whole(reader, "/chat/completions", body)["message"]["content"] == "upon a time"
    body["echo"] = True
    assert whole(reader, "/chat/completions", body)["message"]["content"] == "Once upon a time"
    pieces = [chunk["delta"].get("content") or "" for chunk in streamed(reader, "/chat/completions", body)]
    assert "".join(pieces) == "Once upon a time"
    asked = {**body, "messages": ASK, "continue_final_message": False, "add_generation_prompt": True}
    assert whole(reader, "/chat/completions", asked)["message"]["content"] == "upon a time", "the user's is not echoed"


def test_request_may_bring_its_chat_template(
    reader: httpx.Client,
    say: Any,
    scripted_node: ScriptedNode,
    reading_tokenizer: Tokenizer,
    request: pytest.FixtureRequest,
) -> None:
    body = {**say("ok"), "messages": ASK}
    own = {"chat_template": "{% for m in messages %}[{{ m.content }}{{ eos_token }}]{% endfor %}"}
    whole(reader, "/chat/completions", {**body, **own})
    prompt = reading_tokenizer.decode(scripted_node.seen[request.node.name].prompt)
    assert prompt == "[Hi<|im_end|>]"
    for source, said in (("{% if", "does not compile"), ("{{ raise_exception('no') }}", "refuses"), ("x" * 2**21, "")):
        answer = reader.post("/chat/completions", json={**body, "chat_template": source})
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]
    whole(reader, "/chat/completions", body)
    assert "<|im_start|>" in reading_tokenizer.decode(scripted_node.seen[request.node.name].prompt)


def test_request_id_of_the_body_names_the_answer(reader: httpx.Client, say: Any) -> None:
    body = {**say("ok"), "prompt": "Hi", "request_id": "mine-1"}
    answer = reader.post("/completions", json=body)
    assert (answer.json()["id"], answer.headers["x-request-id"]) == ("cmpl-mine-1", "mine-1")
    answer = reader.post("/completions", json=body, headers={"X-Request-Id": "header"})
    assert answer.json()["id"] == "cmpl-header"


def test_reasoning_stays_in_the_content(reader: httpx.Client, say: Any) -> None:
    text = "<think>\nHm.\n</think>\n\nHello!"
    body = {**say(text), "messages": ASK, "separate_reasoning": False}
    message = whole(reader, "/chat/completions", body)["message"]
    assert (message["content"], message.get("reasoning")) == (text, None)


def test_prompt_may_be_truncated_on_either_side(
    reader: httpx.Client, say: Any, scripted_node: ScriptedNode, request: pytest.FixtureRequest
) -> None:
    body = {**say("ok"), "prompt": [11, 12, 13, 14], "truncate_prompt_tokens": 2}
    for side, kept in (("right", [11, 12]), ("left", [13, 14])):
        whole(reader, "/completions", {**body, "truncation_side": side})
        assert scripted_node.seen[request.node.name].prompt == kept


def test_parameters_of_peers_are_accepted_with_values_without_effect(reader: httpx.Client, say: Any) -> None:
    common = {"use_beam_search": False, "length_penalty": 1.0, "bad_words": [], "allowed_token_ids": []}
    vllm = {"vllm_xargs": {}, "kv_transfer_params": {}, "return_token_offsets": False, "session_id": "s"}
    vllm |= {"return_assistant_tokens_mask": False, "enable_response_messages": False}
    sglang = {"lora_path": "", "return_hidden_states": False, "custom_params": {}, "stop_regex": [], "rid": None}
    sglang |= {"return_sampling_mask": False}
    for path, body in (("/completions", {"prompt": "Hi"}), ("/chat/completions", {"messages": ASK})):
        whole(reader, path, {**say("ok"), **body, **common, **vllm, **sglang})
    whole(reader, "/chat/completions", {**say("ok"), "messages": ASK, "stream_reasoning": True, "input_ids": []})
