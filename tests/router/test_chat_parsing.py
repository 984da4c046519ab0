"""Tools and reasoning as clients of the API see them: the official SDK and a node that says what a test wants."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from router_process import router_process
from scripted_node import ScriptedNode

from router.completions_api.request_bodies import parse_chat
from router.text.tokenizer import Tokenizer

TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {}}}}}
    for name in ("f", "g")
]
ASK: list[Any] = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é 🙂"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


@pytest.fixture
def tokenizer(reading_tokenizer: Tokenizer) -> Tokenizer:
    return reading_tokenizer


@pytest.fixture
def say(say_text: Callable[..., Any]) -> Callable[..., Any]:
    """Like ``say_text``, for a chat."""
    return lambda text, finish="stop", **extra: {**say_text(text, finish, **extra), "messages": ASK}


def collect(stream: Iterator[ChatCompletionChunk]) -> tuple[dict[str, str], list[dict[str, str]], str | None]:
    """Texts by field, calls, and the finish reason of a stream."""
    texts: dict[str, str] = {}
    calls: list[dict[str, str]] = []
    finish = None
    for chunk in stream:
        delta = chunk.choices[0].delta
        for name in ("content", "reasoning", "reasoning_content"):
            texts[name] = texts.get(name, "") + (getattr(delta, name, None) or "")
        for call in delta.tool_calls or []:
            assert call.function is not None
            if call.index == len(calls):
                assert call.id
                assert call.type == "function"
                calls.append({"name": call.function.name or "", "arguments": ""})
            assert call.index == len(calls) - 1
            calls[-1]["arguments"] += call.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish
    return texts, calls, finish


def test_tool_calls_are_equal_whole_and_streamed(sdk: openai.OpenAI, say: Any) -> None:
    fields = say("Let me see.\n" + CALL + "\n" + OTHER)
    choice = sdk.chat.completions.create(tools=TOOLS, **fields).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    called = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    assert called == [("f", '{"a": "é 🙂"}'), ("g", "{}")]
    assert len({call.id for call in choice.message.tool_calls or []}) == 2
    texts, calls, finish = collect(sdk.chat.completions.create(tools=TOOLS, stream=True, **fields))
    assert texts["content"] == "Let me see."
    assert [(call["name"], call["arguments"]) for call in calls] == called
    assert finish == "tool_calls"


def test_arguments_are_streamed_as_they_arrive(sdk: openai.OpenAI, say: Any) -> None:
    fields = say('<tool_call>{"name": "f", "arguments": {"a": "a rather long text, in many tokens"}}</tool_call>')
    chunks = list(sdk.chat.completions.create(tools=TOOLS, stream=True, **fields))
    assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks) > 10


def test_without_parallel_calls_only_the_first_is_sent(sdk: openai.OpenAI, say: Any) -> None:
    message = (
        sdk.chat.completions.create(tools=TOOLS, parallel_tool_calls=False, **say(CALL + OTHER)).choices[0].message
    )
    assert [call.function.name for call in message.tool_calls or []] == ["f"]


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_output_stays_content(sdk: openai.OpenAI, say: Any, fields: dict[str, Any]) -> None:
    choice = sdk.chat.completions.create(**fields, **say(CALL)).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


def test_truncated_call_ends_with_length(sdk: openai.OpenAI, say: Any) -> None:
    choice = sdk.chat.completions.create(tools=TOOLS, **say(CALL[:45], finish="length")).choices[0]
    assert choice.finish_reason == "length"
    assert [call.function.arguments for call in choice.message.tool_calls or []] == ['{"a": ']


def test_forced_call_that_is_cut_off_is_the_same_whole_and_streamed(sdk: openai.OpenAI, say: Any) -> None:
    forced: Any = {"type": "function", "function": {"name": "f"}}
    whole = '[{"name": "f", "arguments": {}}'
    cuts: list[tuple[Any, str, list[str]]] = [
        (forced, '{"a": "b', ['{"a": "b']),
        (forced, '{"a": "b"}', ['{"a": "b"}']),
        ("required", "[", []),
        ("required", whole + ', {"name', ["{}"]),
    ]
    for choose, text, calls in cuts:
        fields = say(text, finish="length")
        choice = sdk.chat.completions.create(tools=TOOLS, tool_choice=choose, **fields).choices[0]
        assert choice.finish_reason == "length"
        assert not choice.message.content
        assert [call.function.arguments for call in choice.message.tool_calls or []] == calls
        texts, streamed, finish = collect(
            sdk.chat.completions.create(tools=TOOLS, tool_choice=choose, stream=True, **fields)
        )
        assert (texts["content"], finish) == ("", "length")
        assert [call["arguments"] for call in streamed] == calls


def test_tools_and_earlier_calls_reach_the_prompt(
    sdk: openai.OpenAI, say: Any, scripted_node: ScriptedNode, tokenizer: Tokenizer, request: pytest.FixtureRequest
) -> None:
    fields = say("ok")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 5}'}}
    fields["messages"] = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "done"}]},
    ]
    sdk.chat.completions.create(tools=TOOLS, **fields)
    prompt = tokenizer.decode(scripted_node.seen[request.node.name].prompt)
    assert '{"name": "f", "parameters"' in prompt
    assert "<tool_call>f:5</tool_call><|im_end|>\n<|im_start|>tool\ndone<|im_end|>" in prompt


def test_reasoning_is_equal_whole_and_streamed(sdk: openai.OpenAI, say: Any) -> None:
    fields = say("<think>\nLet me think.\n</think>\n\nHello!")
    answer: Any = sdk.chat.completions.create(**fields)
    message = answer.choices[0].message
    assert (message.reasoning, message.reasoning_content) == ("Let me think.", "Let me think.")
    assert message.content == "Hello!"
    details = answer.usage.completion_tokens_details
    assert 3 < details.reasoning_tokens < answer.usage.completion_tokens - 1
    texts, _, finish = collect(sdk.chat.completions.create(stream=True, **fields))
    assert texts == {"content": "Hello!", "reasoning": "Let me think.", "reasoning_content": "Let me think."}
    assert finish == "stop"


def test_reasoning_of_a_stream_may_come_as_one_chunk(sdk: openai.OpenAI, say: Any) -> None:
    for text, expected in (
        ("<think>\nLet me think.\n</think>\n\nHello!", ("Let me think.", "Hello!")),
        ("<think>\nLet me", ("Let me", "")),
        ("Hello!", ("", "Hello!")),
    ):
        fields = say(text, stream_reasoning=False)
        chunks: list[Any] = list(sdk.chat.completions.create(stream=True, **fields))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        reasoning = [delta.reasoning_content for delta in deltas if delta.reasoning_content]
        assert len(reasoning) <= 1
        assert ("".join(reasoning), "".join(delta.content or "" for delta in deltas)) == expected


def test_reasoning_may_precede_a_call(sdk: openai.OpenAI, say: Any) -> None:
    fields = say(f"<think>\nf, surely.\n</think>\n\n{CALL}")
    texts, calls, finish = collect(sdk.chat.completions.create(tools=TOOLS, stream=True, **fields))
    assert texts == {"content": "", "reasoning": "f, surely.", "reasoning_content": "f, surely."}
    assert [call["name"] for call in calls] == ["f"]
    assert finish == "tool_calls"


def test_include_reasoning_false_drops_reasoning(sdk: openai.OpenAI, say: Any) -> None:
    message: Any = sdk.chat.completions.create(**say("<think>a</think>b", include_reasoning=False)).choices[0].message
    assert message.content == "b"
    assert (message.reasoning, message.reasoning_content) == (None, None)


def test_small_habits_of_peers(sdk: openai.OpenAI, say: Any) -> None:
    fields = say("ok")
    fields["messages"] = [*ASK, {"role": "assistant", "content": None}, {"role": "user", "content": None, "extra": 1}]
    answer = sdk.chat.completions.create(top_logprobs=0, **fields)
    assert answer.choices[0].message.content == "ok"
    assert answer.choices[0].logprobs is None
    options: Any = {"include_usage": None, "continuous_usage_stats": None}
    assert all(
        chunk.usage is None for chunk in sdk.chat.completions.create(stream=True, stream_options=options, **say("ok"))
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"thinking": {"type": "disabled"}},
        {"enable_thinking": False},
        {"think": False},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"enabled": False}},
    ],
)
def test_reasoning_switched_off_is_not_parsed(
    sdk: openai.OpenAI,
    say: Any,
    fields: dict[str, Any],
    scripted_node: ScriptedNode,
    tokenizer: Tokenizer,
    request: pytest.FixtureRequest,
) -> None:
    message = sdk.chat.completions.create(**say("</think>b", **fields)).choices[0].message
    assert message.content == "</think>b"
    assert tokenizer.decode(scripted_node.seen[request.node.name].prompt).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": True}, {"enable_thinking": True, "thinking": True}),
        ({"think": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": "high", "enabled": True}},
         {"reasoning_effort": "high", "enable_thinking": True, "thinking": True}),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, {"reasoning_effort": "low"}),
        ({"enable_thinking": True, "chat_template_kwargs": {"thinking": False}},
         {"enable_thinking": True, "thinking": False}),
        ({}, {}),
    ],
)  # fmt: skip
def test_fields_of_other_apis_say_whether_and_how_much_to_reason(
    fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    assert parse_chat(json.dumps(body).encode()).template_variables == variables


@pytest.fixture
def node_with_special_token(scripted_node: ScriptedNode) -> Iterator[ScriptedNode]:
    scripted_node.description.vocab_size += 1
    yield scripted_node
    scripted_node.description.vocab_size -= 1


def test_special_tokens_of_tool_calls_become_text(
    reading_dir: Path, node_with_special_token: ScriptedNode, say: Any
) -> None:
    text = '[TOOL_CALLS]f{"a": 1}'
    with (
        router_process(
            reading_dir, ["--decode", node_with_special_token.address, "--tool-call-parser", "mistral"]
        ) as router,
        openai.OpenAI(base_url=f"{router.url}/v1", api_key="none") as sdk,
    ):
        calls = sdk.chat.completions.create(tools=TOOLS, **say(text)).choices[0].message.tool_calls
        assert calls is not None
        assert [(call.function.arguments, len(call.id)) for call in calls] == [('{"a": 1}', 9)]
        assert sdk.chat.completions.create(**say(text)).choices[0].message.content == 'f{"a": 1}'
        shown = say(text, skip_special_tokens=False)
        assert sdk.chat.completions.create(**shown).choices[0].message.content == text


def test_final_message_is_continued(
    sdk: openai.OpenAI, say: Any, scripted_node: ScriptedNode, tokenizer: Tokenizer, request: pytest.FixtureRequest
) -> None:
    fields = say("ok", continue_final_message=True, add_generation_prompt=False)
    fields["messages"] = [*ASK, {"role": "assistant", "content": "Once upon "}]
    sdk.chat.completions.create(**fields)
    assert tokenizer.decode(scripted_node.seen[request.node.name].prompt).endswith("assistant\nOnce upon ")


@pytest.mark.parametrize(
    ("begun", "reasoning", "content"),
    [("<think>I wa", "s.", " So."), ("<think>I was.</think>S", None, "s.</think> So."), ("S", None, "s.</think> So.")],
)
def test_continued_message_may_end_inside_reasoning(
    sdk: openai.OpenAI, say: Any, begun: str, reasoning: str | None, content: str
) -> None:
    fields = say("s.</think> So.", continue_final_message=True, add_generation_prompt=False)
    fields["messages"] = [*ASK, {"role": "assistant", "content": begun}]
    message = sdk.chat.completions.create(**fields).choices[0].message
    assert getattr(message, "reasoning", None) == reasoning
    assert (message.content or "").strip() == content.strip()


@pytest.mark.parametrize("strict", [True, False])
def test_strict_function_reaches_the_node_as_a_grammar(
    sdk: openai.OpenAI, say: Any, scripted_node: ScriptedNode, request: pytest.FixtureRequest, strict: bool
) -> None:
    tools: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": strict}}, TOOLS[1]]
    message = sdk.chat.completions.create(tools=tools, **say(CALL)).choices[0].message
    assert [call.function.name for call in message.tool_calls or []] == ["f"]
    assert bool(scripted_node.seen[request.node.name].message.sampling.grammar) == strict


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [{"type": "web_search"}]}, "only 'function'"),
        ({"tools": [{"type": "function"}]}, "function is missing"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "is not a valid name"),
        ({"tools": [*TOOLS, *TOOLS]}, "two tools have the name 'f'"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "an object"),
        ({"tools": TOOLS, "tool_choice": "any"}, "none, auto, required"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "not in tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice must be"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"functions": [{"name": "f"}]}, "use tools instead"),
        ({"function_call": "auto"}, "use tool_choice instead"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt to false"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"documents": ["text"]}, "documents"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": []}}]}]}, "object"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "function with a name"),
        ({"messages": [{"role": "user", "tool_calls": [{}]}]}, "role 'assistant'"),
        ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "content is missing"),
        ({"messages": [{"role": "function", "content": "1"}]}, "role 'tool'"),
    ],
)
def test_invalid_chat_request_is_refused(sdk: openai.OpenAI, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        sdk.post("/chat/completions", body={"messages": ASK, **fields}, cast_to=object)
