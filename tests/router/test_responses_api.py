"""/v1/responses through the official SDK."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from router_process import RouterProcess
from scripted_node import ScriptedNode

from pdserve.errors import RequestError
from pdserve.pb import pdserve_pb2 as pb
from router.dialect.events import Event
from router.images.chat_images import take_images
from router.responses_api.compaction import PROMPT
from router.responses_api.input_items import input_chat
from router.responses_api.item_writer import OutputItemWriter
from router.responses_api.request import parse_responses
from router.responses_api.tool_forms import ToolOrigin
from router.text.chat.messages import join_parts
from router.text.chat.output_parser import DeltaKind, OutputDelta
from router.text.tokenizer import Tokenizer

TOOLS: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": None}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'


def test_text_response(
    sdk: openai.OpenAI, say_text: Any, scripted_node: ScriptedNode, reading_tokenizer: Tokenizer
) -> None:
    response = sdk.responses.create(input="Hi", instructions="Be brief.", max_output_tokens=50, **say_text("Hello!"))
    assert response.output_text == "Hello!"
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    prompt = reading_tokenizer.decode(scripted_node.seen["test_text_response"].prompt)
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")
    assert scripted_node.seen["test_text_response"].message.sampling.max_tokens == 50


def test_reasoning_text_and_calls_are_items(sdk: openai.OpenAI, say_text: Any) -> None:
    response = sdk.responses.create(input="Hi", tools=TOOLS, **say_text(f"<think>\nHm.\n</think>\n\nSure.{CALL}"))
    reasoning, message, call = (item.to_dict() for item in response.output)
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"] == [{"type": "output_text", "text": "Sure.", "annotations": [], "logprobs": []}]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"a": "é"}')
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 1


def test_events_of_a_stream_are_in_order(sdk: openai.OpenAI, say_text: Any) -> None:
    fields = say_text(f"<think>Hm.</think>Sure.{CALL}")
    events = list(sdk.responses.create(input="Hi", tools=TOOLS, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    once = [kind for index, kind in enumerate(kinds) if not index or kinds[index - 1] != kind]
    part = ["output_item.added", "content_part.added"]
    assert once == [
        *("created", "in_progress"),
        *(*part, "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *(*part, "output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]


def test_sdk_stream_helper_works(sdk: openai.OpenAI, say_text: Any) -> None:
    with sdk.responses.stream(input="Hi", tools=TOOLS, **say_text(f"<think>Hm.</think>Sure.{CALL}")) as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        response = stream.get_final_response()
    assert texts[-1] == response.output_text == "Sure."
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]


# As the Open Responses specification requires them, beside the fields that OpenAI's SDK requires.
REQUIRED = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *(
        "presence_penalty",
        "frequency_penalty",
        "top_logprobs",
        "temperature",
        "reasoning",
        "usage",
        "safety_identifier",
    ),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "prompt_cache_key"),
}
ECHOED: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "presence_penalty": 0.25,
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "truncation": "auto",
    "user": "u",
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
}


def test_responses_and_events_have_all_fields_of_the_schemas(reading_router: RouterProcess, say_text: Any) -> None:
    extra = say_text(f"<think>Hm.</think>Sure.{CALL}")["extra_body"]
    body = {"input": "Hi", "tools": [{"type": "function", "name": "f"}], "service_tier": "auto", **ECHOED, **extra}
    url = f"{reading_router.url}/v1/responses"
    response = httpx.post(url, json=body, trust_env=False).json()
    events = httpx.post(url, json={**body, "stream": True}, trust_env=False).text.split("\n\n")
    for event in events[:-1]:
        TypeAdapter[Any](ResponseStreamEvent).validate_json(event.partition("data: ")[2])
    completed = json.loads(events[-2].partition("data: ")[2])["response"]
    for fields in (response, completed):
        Response.model_validate(fields)
        assert fields.keys() >= REQUIRED
        assert fields["tools"] == [
            {"type": "function", "name": "f", "description": None, "parameters": None, "strict": None}
        ]
        assert {name: fields[name] for name in ECHOED} == ECHOED
        assert fields["service_tier"] == "default"


def test_allowed_tools_are_the_only_tools(
    sdk: openai.OpenAI, say_text: Any, scripted_node: ScriptedNode, reading_tokenizer: Tokenizer
) -> None:
    other = {"type": "function", "name": "other"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    fields = say_text('[{"name": "f", "parameters": {"a": 1}}]', tools=[*TOOLS, other], tool_choice=choice)
    response: Any = sdk.responses.create(input="Hi", **fields)
    assert response.output[0].name == "f"
    assert [tool.name for tool in response.tools] == ["f", "other"]
    seen = scripted_node.seen["test_allowed_tools_are_the_only_tools"]
    assert "other" not in reading_tokenizer.decode(seen.prompt)
    assert "other" not in seen.message.sampling.grammar


def test_format_of_messages_does_not_hold_for_forced_calls(sdk: openai.OpenAI, say_text: Any) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
    said = '[{"name": "f", "parameters": {"a": 1}}]'
    fields = say_text(said)
    response: Any = sdk.responses.create(input="Hi", tools=TOOLS, tool_choice="required", text=form, **fields)
    assert (response.output[0].type, response.output[0].arguments) == ("function_call", '{"a": 1}')
    assert response.to_dict()["text"]["format"] == {**form["format"], "description": None, "strict": False}


def test_truncated_text_is_incomplete(sdk: openai.OpenAI, say_text: Any) -> None:
    fields = say_text("Hello", finish="length")
    response = sdk.responses.create(input="Hi", **fields)
    assert response.status == response.output[0].to_dict()["status"] == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert list(sdk.responses.create(input="Hi", stream=True, **fields))[-1].type == "response.incomplete"


def test_empty_output_is_an_empty_message(sdk: openai.OpenAI, say_text: Any) -> None:
    response = sdk.responses.create(input="Hi", **say_text(""))
    assert [item.type for item in response.output] == ["message"]
    assert response.output_text == ""


def test_response_has_logprobs(sdk: openai.OpenAI, say_text: Any) -> None:
    fields = say_text("Hello!")
    response: Any = sdk.responses.create(input="Hi", include=["message.output_text.logprobs"], **fields)
    logprobs = response.output[0].content[0].logprobs
    assert "".join(entry.token for entry in logprobs) == "Hello!"


def test_late_failure_ends_the_stream_with_an_event(
    sdk: openai.OpenAI, scripted_node: ScriptedNode, reading_tokenizer: Tokenizer
) -> None:
    async def script(conversation: Any) -> None:
        conversation.token(reading_tokenizer.encode("a")[0])
        conversation.fail(pb.Failure.DEADLINE, "too late")

    scripted_node.scripts["late"] = script
    events = list(sdk.responses.create(input="Hi", stream=True, extra_body={"cache_salt": "late"}))
    failed: Any = events[-1]
    assert failed.type == "response.failed"
    assert failed.response.error.message == "too late"
    assert failed.response.output[0].content[0].text == "a"


def test_neighbours_of_one_role_are_one_message() -> None:
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Sure."}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "one"}]},
        {"type": "message", "role": "assistant", "content": "a"},
        {"type": "message", "role": "assistant", "content": "b"},
    ]
    user, assistant, tool, *rest = input_chat(conversation, None).joined()
    assert user == conversation[0]
    assert (assistant["reasoning"], assistant["content"]) == ("Hm.", "Sure.")
    assert [call["id"] for call in assistant["tool_calls"]] == ["1", "2"]
    assert tool == {"role": "tool", "tool_call_id": "1", "content": "one"}
    assert rest == [{"role": "assistant", "content": "a\nb"}]


def test_output_items_can_be_sent_back(sdk: openai.OpenAI, say_text: Any) -> None:
    fields = say_text(f"<think>Hm.</think>Sure.{CALL}")
    first = sdk.responses.create(input="Hi", tools=TOOLS, **fields)
    output: Any = [item.to_dict() for item in first.output]
    texts = [{"type": "input_text", "text": "42"}]
    output.append({"type": "function_call_output", "call_id": output[-1]["call_id"], "output": texts})
    assert sdk.responses.create(input=output, tools=TOOLS, **fields).status == "completed"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "input is missing"),
    ({"input": []}, "input is empty"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "not stored"),
    ({"input": [{"type": "item_reference"}]}, "needs the id"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": ""}]}, "no function_call before input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input_audio"),
    ({"input": [{"type": "custom_tool_call_output", "call_id": "1", "output": ""}]}, "no custom_tool_call before"),
    ({"input": [{"type": "custom_tool_call", "call_id": "1", "name": "f"}]}, "input[0].input must be a string"),
    ({"input": [{"type": "robot_call"}]}, "robot_call"),
    ({"input": [{"role": "robot", "content": ""}]}, "role must be"),
    ({"input": [{"type": "reasoning", "content": [{}]}]}, "reasoning must be"),
    ({"input": "a", "previous_response_id": "resp_1"}, "not stored"),
    ({"input": "a", "conversation": "conv_1"}, "conversation is not supported"),
    ({"input": "a", "background": True}, "background"),
    ({"input": "a" * 5000, "truncation": "auto"}, "shorten the prompt"),
    ({"input": "a", "metadata": {"a": 1}}, "metadata"),
    (
        {"input": "a", "tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "at least one",
    ),
    (
        {
            "input": "a",
            "tools": TOOLS,
            "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]},
        },
        "'g'",
    ),
    ({"input": "a", "prompt": {"id": "x"}}, "prompt is not supported"),
    ({"input": "a", "include": ["robot.results"]}, "robot.results"),
    ({"input": "a", "tools": [{"type": "robot"}]}, "'robot'; use one of function, custom"),
    ({"input": "a", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name 'a b' is not a valid name"),
    ({"input": "a", "tools": [{"type": "namespace", "name": "n"}]}, "list of tools"),
    ({"input": "a", "tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "does not run here"),
    ({"input": "a", "reasoning": {"effort": "ultra"}}, "reasoning.effort"),
    ({"input": "a", "text": {"format": {"type": "yaml"}}}, "text.format"),
    ({"input": "a", "messages": []}, "/v1/chat/completions; send the request there"),
    ({"input": "a", "echo": True}, "/v1/chat/completions"),
    ({"input": "a", "temprature": 1}, "did you mean temperature"),
    ({"input": "a", "max_output_tokens": 0}, "at least 1"),
]


@pytest.mark.parametrize(("body", "said"), REFUSED)
def test_unsupported_fields_are_rejected(reading_router: RouterProcess, body: dict[str, Any], said: str) -> None:
    response = httpx.post(f"{reading_router.url}/v1/responses", json=body, trust_env=False)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


AUDIO = {"type": "input_audio", "input_audio": {}}
IMAGE = {"type": "input_image", "image_url": "data:,"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "max_output_tokens": 100_000}, "max_output_tokens"),
        ({"input": "a" * 5000}, "input"),
        ({"input": "a" * 1_000_000}, "input"),
        ({"instructions": "a", "input": [{"role": "user", "content": [AUDIO]}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, IMAGE]}]}, "input[0].content[1]"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "user", "content": [IMAGE]}]}, "input[1].content[0]"),
        ({"input": [{"role": "user", "content": [IMAGE]}, {"role": "system", "content": "a"}]}, "input[0].content[0]"),
        ({"input": "a", "text": {"format": {"type": "yaml"}}}, "text.format"),
    ],
)
def test_errors_name_fields_of_the_body(reading_router: RouterProcess, body: dict[str, Any], param: str) -> None:
    error = httpx.post(f"{reading_router.url}/v1/responses", json=body, trust_env=False).json()["error"]
    assert error["param"] == param
    assert not re.search(r"\bmessages\b|\bmax_tokens\b", error["message"])


def test_compacted_conversation_continues(
    sdk: openai.OpenAI, say_text: Any, scripted_node: ScriptedNode, reading_tokenizer: Tokenizer, request: Any
) -> None:
    items: list[Any] = [{"role": "user", "content": "Tuesday?"}, {"role": "assistant", "content": "Yes."}]
    compacted = sdk.responses.compact(input=items, instructions="Be brief", **say_text("They meet on Tuesday."))
    prompt = reading_tokenizer.decode(scripted_node.seen[request.node.name].prompt)
    assert prompt.index("Be brief") < prompt.index("Tuesday?") < prompt.index("Yes.") < prompt.index(PROMPT)
    assert (compacted.object, [item.type for item in compacted.output]) == ("response.compaction", ["compaction"])
    assert compacted.usage.output_tokens > 0

    output: list[Any] = [item.model_dump() for item in compacted.output]
    sdk.responses.create(input=[*output, {"role": "user", "content": "When?"}], **say_text("x"))
    prompt = reading_tokenizer.decode(scripted_node.seen[request.node.name].prompt)
    assert prompt.index(PROMPT) < prompt.index("They meet on Tuesday.") < prompt.index("When?")
    assert "Yes." not in prompt


@pytest.mark.parametrize(("text", "finish", "said"), [("half a summ", "length", "fit"), (" ", "stop", "no summary")])
def test_incomplete_summary_is_an_error(sdk: openai.OpenAI, say_text: Any, text: str, finish: str, said: str) -> None:
    with pytest.raises(openai.APIStatusError, match=said):
        sdk.responses.compact(input="Hi", **say_text(text, finish))


def test_bad_compaction_is_refused(sdk: openai.OpenAI, say_text: Any) -> None:
    fields = say_text("x")
    with pytest.raises(openai.BadRequestError, match="input is empty"):
        sdk.responses.compact(**fields)
    with pytest.raises(openai.BadRequestError, match="model"):
        sdk.post("/responses/compact", body={"input": "Hi"}, cast_to=object)
    for content in ("gAAAA", "!", "\u00e4", 3, None):
        item: Any = {"type": "compaction", "encrypted_content": content}
        with pytest.raises(openai.BadRequestError, match="encrypted_content"):
            sdk.responses.create(input=[item], **fields)


def test_responses_are_not_stored(sdk: openai.OpenAI, say_text: Any) -> None:
    response = sdk.responses.create(input="Hi", store=True, **say_text("Hello"))
    for call in (sdk.responses.retrieve, sdk.responses.delete, sdk.responses.cancel, sdk.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="not stored"):
            call(response.id)


# What Codex CLI sends, in short.
AGENT: dict[str, Any] = {
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"turn_id": "1", "session": {"id": "2"}},
    "internal_metadata": {},
    "text": {"format": None, "verbosity": "low"},
    "tools": [
        {"type": "function", "name": "exec", "strict": False, "parameters": {"type": "object"}},
        {
            "type": "custom",
            "name": "patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE"},
        },
        {"type": "local_shell"},
        {"type": "namespace", "name": "team", "tools": [{"type": "function", "name": "spawn"}]},
        {"type": "namespace", "name": "mcp__files__", "tools": [{"type": "function", "name": "read"}]},
        {"type": "web_search", "external_web_access": True},
    ],
}
HISTORY: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Skills."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Here."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Mend it."}]},
    {"type": "reasoning", "summary": [], "encrypted_content": None},
    {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "mending"}},
    {"type": "function_call", "call_id": "1", "name": "spawn", "namespace": "team", "arguments": "{}"},
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Hurry."}]},
    {"type": "function_call_output", "call_id": "1", "output": [IMAGE]},
    {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": 'a\n"b"'},
    {"type": "custom_tool_call_output", "call_id": "2", "output": "failed"},
    {
        "type": "local_shell_call",
        "call_id": "3",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"], "env": {}},
    },
    {"type": "local_shell_call_output", "id": "3", "call_id": "3", "output": "a"},
    {"type": "ghost_snapshot", "ghost_commit": {}},
    {"type": "message", "role": "user", "content": [IMAGE]},
    {"role": "assistant", "content": "An image?"},
]


def test_session_of_an_agent_becomes_a_chat() -> None:
    body = parse_responses(
        json.dumps({**AGENT, "instructions": "You help.", "input": HISTORY}).encode(), has_store=False
    )
    roles = [message["role"] for message in body.messages]
    assert roles == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "user",
        "assistant",
    ]
    taken = take_images(body.messages, sees=False)
    texts = [{**message, "content": join_parts(message.get("content"))} for message in taken.messages]
    system, user, searched, result, patched, failed, listed, _, seen, _ = texts
    assert (system["content"], user["content"]) == ("You help.\nBe brief.\nSkills.", "Here.\nMend it.")
    assert "mending" in searched["content"]
    assert result["content"].endswith("\nHurry.")
    calls = [message["tool_calls"][0]["function"] for message in (searched, patched, listed)]
    assert [call["name"] for call in calls] == ["team.spawn", "patch", "local_shell"]
    assert [json.loads(call["arguments"]) for call in calls] == [{}, {"input": 'a\n"b"'}, {"command": ["ls"]}]
    assert failed == {"role": "tool", "tool_call_id": "2", "content": "failed"}
    assert "image" in seen["content"]
    assert body.tool_use.names == ["exec", "patch", "local_shell", "team.spawn", "mcp__files__read"]
    assert "start: LINE" in body.tool_use.tools[1]["function"]["description"]
    assert ["web_search" in text for text in body.warnings] == [True]
    assert ["2 images" in text for text in taken.warnings] == [True]


def test_calls_have_the_form_of_their_tool(sdk: openai.OpenAI, say_text: Any) -> None:
    written = [
        ("patch", {"input": "a\nb"}),
        ("local_shell", {"command": ["ls", "-l"], "timeout_ms": 5}),
        ("team.spawn", {"a": 1}),
    ]
    calls = [{"name": name, "arguments": arguments} for name, arguments in written]
    text = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    fields = say_text(text, tools=AGENT["tools"], client_metadata={"turn_id": "1"})
    response: Any = sdk.responses.create(input="Hi", **fields)
    custom, shell, spawn = response.output
    assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "patch", "a\nb")
    assert (shell.type, shell.action.command, shell.action.timeout_ms) == ("local_shell_call", ["ls", "-l"], 5)
    assert (spawn.type, spawn.name, spawn.namespace, spawn.arguments) == ("function_call", "spawn", "team", '{"a": 1}')
    assert "web_search" in response.warnings[0]
    assert [tool.type for tool in response.tools] == ["function", "custom", "local_shell", "namespace", "namespace"]

    events = list(sdk.responses.create(input="Hi", stream=True, **fields))
    done = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert [event.input for event in done] == ["a\nb"]
    final: Any = events[-1]
    assert [item.type for item in final.response.output] == ["custom_tool_call", "local_shell_call", "function_call"]
    again = [item.to_dict() for item in final.response.output]
    outputs = [{"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"} for item in again]
    turn: Any = [*again, *outputs]
    assert sdk.responses.create(input=turn, **fields).status == "completed"


@pytest.mark.parametrize(("kind", "arguments"), [("custom", '{"input": "ab'), ("local_shell", '{"command"')])
def test_unfinished_arguments_of_other_tools_are_kept(reading_tokenizer: Tokenizer, kind: str, arguments: str) -> None:
    writer = OutputItemWriter(lambda: "call", reading_tokenizer, 0, origins={"f": ToolOrigin(kind, "f")})
    writer.write([OutputDelta(DeltaKind.CALL, "f"), OutputDelta(DeltaKind.ARGUMENTS, arguments)])
    writer.end(complete=False)
    item = msgspec.to_builtins(writer.items[0])
    assert item["status"] == "incomplete"
    assert item.get("input") == arguments or item["action"]["command"] == [arguments]


pieces = st.lists(
    st.tuples(
        st.sampled_from([DeltaKind.CONTENT, DeltaKind.REASONING, DeltaKind.CALL]), st.text(min_size=1, max_size=3)
    ),
    max_size=8,
)


class EventRecorder:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, event: Event) -> None:
        fields = json.loads(event.data)
        assert event.kind == fields["type"]
        self.events.append(fields)

    def write_large(self, kind: str, make: Callable[[], Iterator[bytes]]) -> None:
        self.write(Event(kind, b"".join(make())))


@given(pieces, st.booleans())
def test_events_equal_the_items(
    reading_tokenizer: Tokenizer, written: list[tuple[DeltaKind, str]], complete: bool
) -> None:
    """The joined deltas of an item are its text, and its done event holds the item."""
    recorder = EventRecorder()
    writer = OutputItemWriter(lambda: "call", reading_tokenizer, 0)
    writer.stream = recorder
    for kind, text in written:
        writer.write([OutputDelta(kind, text)])
        if kind is DeltaKind.CALL:
            writer.write([OutputDelta(DeltaKind.ARGUMENTS, text)])
    writer.end(complete)
    for index, item in enumerate(msgspec.to_builtins(writer.items)):
        mine = [event for event in recorder.events if event["output_index"] == index]
        deltas = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert mine[0]["type"] == "response.output_item.added"
        assert mine[-1] == {**mine[-1], "type": "response.output_item.done", "item": item}
        assert item["status"] == ("completed" if complete or index < len(writer.items) - 1 else "incomplete")


names = st.sampled_from(["type", "role", "content", "text", "summary", "name", "message", "reasoning"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | names,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


@given(json_values)
def test_any_input_is_parsed_or_rejected(value: Any) -> None:
    for item in (value, [value], [{"type": "reasoning", "content": value}], [{"type": "function_call", "name": value}]):
        try:
            assert parse_responses(json.dumps({"input": item}).encode(), has_store=False).messages
        except RequestError:
            continue
