"""/v1/messages: bodies, streams and errors of Anthropic's protocol. tests/clients has its SDK."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine import patience
from router_process import RouterProcess
from scripted_node import ScriptedNode

from pdserve.errors import RequestError
from pdserve.pb import pdserve_pb2 as pb
from router.images.chat_images import take_images
from router.messages_api.request import parse_count_tokens, parse_messages
from router.text.chat.messages import check_messages
from router.text.tokenizer import Tokenizer

Fields = dict[str, Any]

USER: Fields = {"role": "user", "content": "Hi"}
TOOLS = [{"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'


@pytest.fixture(scope="module")
def http(reading_router: RouterProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=reading_router.url, timeout=patience(20), trust_env=False) as http:
        yield http


@pytest.fixture
def ask(http: httpx.Client, say_text: Any) -> Callable[..., httpx.Response]:
    """Send a request that the node answers with a text."""

    def ask(text: str, finish: str = "stop", **fields: Any) -> httpx.Response:
        said = say_text(text, finish)
        body = {"model": said["model"], "max_tokens": 50, "messages": [USER], **said["extra_body"], **fields}
        return http.post("/v1/messages", json=body)

    return ask


def events_of(response: httpx.Response) -> list[Fields]:
    events = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        kind, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    return events


def accumulated(events: list[Fields]) -> Fields:
    """The message that a client builds from the events of a stream."""
    message: Fields = events[0]["message"]
    for event in events:
        match event:
            case {"type": "content_block_start", "content_block": block}:
                message["content"].append({**block, "written": ""})
            case {"type": "content_block_delta", "index": index, "delta": {"type": "signature_delta"} as delta}:
                message["content"][index]["signature"] = delta["signature"]
            case {"type": "content_block_delta", "index": index, "delta": {"type": kind, **rest}}:
                block = message["content"][index]
                assert kind == {"text": "text_delta", "thinking": "thinking_delta"}.get(
                    block["type"], "input_json_delta"
                )
                block["written"] += next(iter(rest.values()))
            case {"type": "content_block_stop", "index": index}:
                block = message["content"][index]
                written = block.pop("written")
                name = "input" if block["type"] == "tool_use" else block["type"]
                block[name] = json.loads(written or "{}") if name == "input" else written
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message |= {**delta, "usage": usage}
    return message


def test_thinking_text_and_calls_are_blocks(ask: Any, scripted_node: ScriptedNode) -> None:
    response = ask(f"<think>\nHm.\n</think>\n\nSure.{CALL}", tools=TOOLS)
    assert response.headers["request-id"] == response.headers["x-request-id"]
    message = response.json()
    thinking, text, call = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": thinking["signature"]}
    assert thinking["signature"]
    assert text == {"type": "text", "text": "Sure."}
    assert call == {"type": "tool_use", "id": call["id"], "name": "f", "input": {"a": "é"}}
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "tool_use")
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 1
    sampling = scripted_node.seen["test_thinking_text_and_calls_are_blocks"].message.sampling
    assert sampling.max_tokens == 50


TEXTS = ["Hello", f"<think>Hm.</think>Sure.{CALL}{CALL}", f"{CALL}", "", "<think>Hm.", f"a{CALL}b"]


@pytest.mark.parametrize("text", TEXTS)
def test_stream_equals_the_whole_message(ask: Any, text: str) -> None:
    whole = ask(text, tools=TOOLS).json()
    events = events_of(ask(text, tools=TOOLS, stream=True))
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    streamed = accumulated(events)
    for message in (whole, streamed):
        del message["id"]
        for block in message["content"]:
            block.pop("id", None)
    assert streamed == whole


def test_stop_sequence_is_named(ask: Any) -> None:
    message = ask("Hello, world", stop_sequences=["x", ", w"]).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", ", w")
    assert message["content"] == [{"type": "text", "text": "Hello"}]
    delta = events_of(ask("Hello, world", stop_sequences=[", w"], stream=True))[-2]["delta"]
    assert delta == {"stop_reason": "stop_sequence", "stop_sequence": ", w"}


def test_limits_are_told_apart(ask: Any, scripted_node: ScriptedNode) -> None:
    """A limit beyond the context is lowered, and its end has a reason of its own."""
    assert ask("Hello", finish="length").json()["stop_reason"] == "max_tokens"
    assert ask("Hello", finish="length", max_tokens=32_000).json()["stop_reason"] == "model_context_window_exceeded"
    conversation = scripted_node.seen["test_limits_are_told_apart"]
    assert conversation.message.sampling.max_tokens + len(conversation.prompt) == 1000


@pytest.mark.parametrize("arguments", ['{"a": 1', '{"a": 1,}', '{"a":' + "[" * 2000 + "]" * 2000 + "}"])
def test_arguments_that_are_no_json_are_kept(ask: Any, arguments: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}'
    message = ask(text, finish="length", tools=TOOLS, max_tokens=5000).json()
    assert message["content"][0]["input"] == {"INVALID_JSON": arguments}


def test_reasoning_may_be_left_out(ask: Any) -> None:
    message = ask("<think>Hm.</think>Sure.", thinking={"type": "adaptive", "display": "omitted"}).json()
    assert [block["type"] for block in message["content"]] == ["text"]


def test_budget_of_thinking_is_for_models_that_reason(
    ask: Any, client: httpx.Client, scripted_node: ScriptedNode
) -> None:
    thinking = {"type": "enabled", "budget_tokens": 7}
    ask("Hi", thinking=thinking)
    name = "test_budget_of_thinking_is_for_models_that_reason"
    assert scripted_node.seen[name].message.sampling.thinking_token_budget == 7
    body = {"max_tokens": 5, "messages": [USER], "cache_salt": name, "thinking": thinking}
    assert client.post("/v1/messages", json=body).status_code == 200
    assert not scripted_node.seen[name].message.sampling.thinking_end_ids


def test_late_failure_ends_the_stream_with_an_error_event(
    http: httpx.Client, scripted_node: ScriptedNode, reading_tokenizer: Tokenizer
) -> None:
    async def script(conversation: Any) -> None:
        conversation.token(reading_tokenizer.encode("a")[0])
        conversation.fail(pb.Failure.DEADLINE, "too late")

    scripted_node.scripts["late message"] = script
    body = {"max_tokens": 5, "messages": [USER], "stream": True, "cache_salt": "late message"}
    last = events_of(http.post("/v1/messages", json=body))[-1]
    assert last["error"] == {"type": "timeout_error", "message": "too late"}


# As Claude Code calls: system blocks, reminders, results of several tools, instructions between them.
AGENT: Fields = {
    "model": "small",
    "max_tokens": 32_000,
    "stream": True,
    "metadata": {"user_id": "user_1"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=0af31;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief."},
    ],
    "tools": [{**TOOLS[0], "eager_input_streaming": True}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<reminder>"}, {"type": "text", "text": "Do it."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Sure."},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                {"type": "tool_use", "id": "2", "name": "f", "input": {}},
            ],
        },
        {"role": "system", "content": "Hurry."},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "one"}]},
                {"type": "tool_result", "tool_use_id": "2", "is_error": True},
                {"type": "text", "text": "Go on."},
            ],
        },
        {"role": "user", "content": "And on."},
    ],
}


def test_conversation_of_an_agent_becomes_a_chat() -> None:
    body = parse_messages(json.dumps(AGENT).encode())
    calls = [
        {"id": str(i), "type": "function", "function": {"name": "f", "arguments": a}}
        for i, a in ((1, {"a": 1}), (2, {}))
    ]
    assert body.messages == [
        {"role": "system", "content": "You are an agent.\nBe brief."},
        {"role": "user", "content": "<reminder>\nDo it."},
        {"role": "assistant", "reasoning": "Hm.", "content": "Sure.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": ""},
        {"role": "user", "content": "Go on.\nHurry.\nAnd on."},
    ]
    assert body.tools == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert body.template_variables == {"reasoning_effort": "high", "enable_thinking": True, "thinking": True}
    assert body.user == "user_1"
    assert not body.continue_final_message


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
def test_empty_messages_are_empty_texts(content: Any) -> None:
    data = json.dumps({"max_tokens": 1, "messages": [{"role": "user", "content": content}]}).encode()
    assert parse_messages(data).messages == [{"role": "user", "content": ""}]


def test_blocks_with_text_become_text() -> None:
    blocks = [
        {"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "C"}]},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}},
    ]
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "f"}]}
    messages = [{"role": "user", "content": [result, *blocks]}]
    chat = parse_messages(json.dumps({"max_tokens": 1, "messages": messages}).encode()).messages
    assert [message["content"] for message in chat] == ["f", "T\nS\nC\nD"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}


@pytest.mark.parametrize("block", [IMAGE, PDF], ids=["image", "PDF"])
@pytest.mark.parametrize(
    "later", [[], [USER], [{"role": "assistant", "content": "It is"}]], ids=["last", "user", "begun"]
)
def test_image_of_the_newest_turn_is_refused_by_its_place(ask: Any, block: dict[str, Any], later: list[Any]) -> None:
    shown = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, block]}
    messages = [USER, {"role": "assistant", "content": "Yes?"}, shown, *later]
    refused = ask("A cat", messages=messages)
    assert refused.status_code == 400
    assert (
        f"messages[2].content[1] is a{'n' if block is IMAGE else ''} {block['type']}"
        in refused.json()["error"]["message"]
    )
    answered = [*messages[:3], {"role": "assistant", "content": "A cat"}, USER]
    assert ask("Yes", messages=answered).status_code == 200


def test_what_the_model_cannot_read_becomes_a_placeholder_with_a_warning(ask: Any) -> None:
    image = IMAGE
    pdf = PDF
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    messages = [
        {"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [image, pdf]}]},
    ]
    tools = [*TOOLS, {"type": "web_search_20250305", "name": "web_search"}]
    fields = {"messages": messages, "tools": tools, "mcp_servers": [{"type": "url"}]}
    warnings = ask("A cat", **fields).json()["warnings"]
    words = ("web_search", "mcp", "1 blocks of type 'document'", "2 images")
    assert [word in text for word, text in zip(words, warnings, strict=True)] == [True] * 4
    assert events_of(ask("A cat", stream=True, **fields))[0]["message"]["warnings"] == warnings
    chat = parse_messages(json.dumps({"max_tokens": 1, **fields}).encode())
    read = take_images(chat.messages, sees=False).messages
    assert check_messages(read)[0]["content"] == "[image: this model reads text only]\nWhat is it?"
    assert chat.tool_use.names == ["f"]


def test_many_tools_with_long_names_are_offered() -> None:
    tools = [{"name": f"mcp__{index:0>123}", "input_schema": {"type": "object"}} for index in range(400)]
    choice = {"type": "auto", "disable_parallel_tool_use": None}
    fields = {"max_tokens": 1, "messages": [USER], "tools": tools, "tool_choice": choice, "mcp_servers": []}
    body = parse_messages(json.dumps(fields).encode())
    assert len(body.tool_use.names) == 400
    assert not body.warnings


def test_later_instructions_change_no_earlier_part_of_the_chat() -> None:
    """Otherwise each of them would void the cached prefix."""
    messages = [USER, {"role": "assistant", "content": "a"}, {"role": "system", "content": "b"}]
    chat = parse_messages(json.dumps({"max_tokens": 1, "system": "s", "messages": messages}).encode()).messages
    assert chat[:3] == [{"role": "system", "content": "s"}, USER, messages[1]]
    assert chat[3:] == [{"role": "user", "content": "b"}]


_HASH = "x-anthropic-billing-header: cc_version=2; cch=0af31;"


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("as_blocks", [False, True])
@pytest.mark.parametrize(
    ("text", "left"),
    [
        (_HASH, None),
        (f"{_HASH}\nBe brief.\n{_HASH}", f"Be brief.\n{_HASH}"),
        (f"{_HASH}\n{_HASH}", _HASH),
        ("x-anthropic-billing-headers are secret.", "x-anthropic-billing-headers are secret."),
        (f"Be brief.\n{_HASH}", f"Be brief.\n{_HASH}"),
    ],
)
def test_only_the_line_with_the_hash_of_a_request_is_left_out(
    inline: bool, as_blocks: bool, text: str, left: str | None
) -> None:
    content = [{"type": "text", "text": text}] if as_blocks else text
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "one"}]}
    if inline:  # between a call and its result
        body = {"max_tokens": 1, "messages": [USER, call, {"role": "system", "content": content}, result]}
        expected = "one" if left is None else f"one\n{left}"
        assert parse_messages(json.dumps(body).encode()).messages[-1]["content"] == expected
    else:
        messages = parse_messages(
            json.dumps({"max_tokens": 1, "system": content, "messages": [USER]}).encode()
        ).messages
        assert messages[:-1] == ([] if left is None else [{"role": "system", "content": left}])


def test_output_continues_a_last_message_of_the_assistant(
    ask: Any, scripted_node: ScriptedNode, reading_tokenizer: Tokenizer
) -> None:
    ask("!", messages=[USER, {"role": "assistant", "content": "Hello"}])
    prompt = scripted_node.seen["test_output_continues_a_last_message_of_the_assistant"].prompt
    assert reading_tokenizer.decode(prompt).endswith("<|im_start|>assistant\nHello")


def test_tool_choice_and_formats_become_those_of_chats() -> None:
    def chat(**fields: Any) -> Any:
        return parse_messages(json.dumps({"max_tokens": 1, "messages": [USER], "tools": TOOLS, **fields}).encode())

    assert chat(tool_choice={"type": "any"}).tool_use.required
    assert chat(tool_choice={"type": "tool", "name": "f"}).tool_use.named == "f"
    assert not chat(tool_choice={"type": "none"}).tool_use.tools
    assert not chat(tool_choice={"type": "auto", "disable_parallel_tool_use": True}).tool_use.parallel
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    structured = chat(tools=[], output_config={"format": {"type": "json_schema", "schema": schema}})
    assert structured.structure.field == "response_format"
    assert chat(thinking={"type": "disabled"}).template_variables == {"enable_thinking": False, "thinking": False}


def test_tokens_of_a_prompt_are_counted(http: httpx.Client, ask: Any, scripted_node: ScriptedNode) -> None:
    ask("Hello", tools=TOOLS, system="Be brief.")
    prompt = scripted_node.seen["test_tokens_of_a_prompt_are_counted"].prompt
    body = {"model": "small", "messages": [USER], "tools": TOOLS, "system": "Be brief."}
    assert http.post("/v1/messages/count_tokens", json=body).json() == {"input_tokens": len(prompt)}


def block(**fields: Any) -> Fields:
    return {"messages": [{"role": "user", "content": [fields]}]}


REFUSED: list[tuple[Fields, str]] = [
    ({"messages": [USER]}, "max_tokens is missing"),
    ({"max_tokens": 0}, "at least 1"),
    ({"messages": []}, "messages is empty"),
    ({"messages": [{"role": "system", "content": ""}]}, "messages is empty"),
    (block(type="video"), "messages[0].content[0].type: invalid value 'video'"),
    (block(type="tool_use", id="1", name="f", input={}), "type 'tool_use', which its role may not have"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role: invalid enum value 'robot'"),
    (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            ]
        },
        "add a message with its tool_result",
    ),
    ({"messages": [USER, {"role": "assistant", "content": []}]}, "no text to continue"),
    ({"system": [{"text": "a"}]}, "type is missing"),
    (
        {
            "tools": [{"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "tool", "name": "web_search"},
        },
        "'web_search', which does not run here",
    ),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name 'a b' is not a valid name"),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema must be"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config.format"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
    ({"tool_choice": {"type": "any"}}, "needs tools"),
    ({"temprature": 1}, "did you mean temperature"),
    ({"mcp_servers": 1}, "mcp_servers"),
    ({"system": "a" * 20_000}, "prompt is too long"),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED)
def test_bad_requests_get_an_error_of_the_protocol(http: httpx.Client, fields: Fields, said: str) -> None:
    body = {"max_tokens": 5, "messages": [USER], **fields}
    if said == "max_tokens is missing":
        del body["max_tokens"]
    response = http.post("/v1/messages", json=body)
    assert response.status_code == 400
    answer = response.json()
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    assert said in answer["error"]["message"]
    assert answer["request_id"] == response.headers["request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/messages", 404, "not_found_error"),
        ("POST", "/v1/messages/count_tokens", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("GET", "/v1/messages/batches", 404, "not_found_error"),
    ],
)
def test_errors_have_a_status_and_type(http: httpx.Client, method: str, path: str, status: int, kind: str) -> None:
    limit = {} if path.endswith("count_tokens") else {"max_tokens": 5}
    response = http.request(method, path, json={"model": "claude", "messages": [USER], **limit})
    assert response.status_code == status
    assert response.json()["error"]["type"] == kind


names = st.sampled_from(
    ["type", "role", "content", "text", "user", "assistant", "system", "thinking", "tool_use", "input"]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_any_input_is_parsed_or_rejected(value: Any) -> None:
    for fields in (
        {"messages": value},
        {"messages": [value]},
        block(type="tool_result", content=value),
        {"system": value},
    ):
        data = json.dumps({"max_tokens": 5, "messages": [USER], **fields}).encode()
        for parse in (parse_messages, parse_count_tokens):
            try:
                assert parse(data).messages
            except RequestError:
                continue
