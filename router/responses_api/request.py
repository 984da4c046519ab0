"""The request body of /v1/responses and the chat it becomes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pdserve.errors import RequestError, shown
from router.completions_api.body_parsing import convert, parse_json
from router.completions_api.request_bodies import ChatBody, check_chat

Message = dict[str, Any]

MAX_INPUT_ITEMS = 10_000
LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (LOGPROBS, "reasoning.encrypted_content")  # the second has no effect: reasoning is never encrypted
_NOT_STORED = "responses are not stored, send the whole conversation as input"


class Reasoning(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None  # accepted without effect: reasoning is sent in full
    generate_summary: str | None = None


class Text(msgspec.Struct, frozen=True):
    format: dict[str, Any] = {}
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Fields of this endpoint; other fields are those of a chat."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int = 0
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    reasoning: Reasoning = Reasoning()
    text: Text = Text()
    include: list[str] = []
    metadata: dict[str, Any] = {}
    store: bool = False  # accepted without effect
    background: bool = False
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    max_tool_calls: int | None = None  # of built-in tools, which do not exist here


# Chat fields that this endpoint spells differently.
CHAT_ONLY = frozenset(
    {*("messages", "max_tokens", "max_completion_tokens", "logprobs", "response_format", "reasoning_effort", "n")}
    | {*("prompt_logprobs", "return_token_ids", "include_reasoning", "continue_final_message")}
    | {"add_generation_prompt"}
)


class ResponsesBody(ChatBody, kw_only=True, frozen=True):
    """The chat, with the original request."""

    request: ResponsesRequest


def parse_responses(data: bytes) -> ResponsesBody:
    """Raises RequestError, also for features that need stored responses."""
    fields = parse_json(data)
    wrong = next((name for name in fields if name in CHAT_ONLY), None)
    if wrong is not None:
        raise RequestError(f"{wrong} is a parameter of /v1/chat/completions; leave it out", wrong, "unknown_parameter")
    own = {name: value for name, value in fields.items() if name in ResponsesRequest.__struct_fields__}
    request = convert(own, ResponsesRequest)
    _check(request)
    rest = {name: value for name, value in fields.items() if name not in own}
    chat = convert({**rest, **_as_chat(request)}, ChatBody)
    body = ResponsesBody(request=request, **{name: getattr(chat, name) for name in ChatBody.__struct_fields__})
    check_chat(body)
    return body


def _check(request: ResponsesRequest) -> None:
    unsupported = {
        "previous_response_id": (request.previous_response_id is not None, _NOT_STORED),
        "conversation": (request.conversation is not None, _NOT_STORED),
        "background": (request.background, _NOT_STORED),
        "prompt": (request.prompt is not None, "send input and instructions"),
        "truncation": (request.truncation == "auto", "shorten the input"),
    }
    for name, (given, remedy) in unsupported.items():
        if given:
            raise RequestError(f"{name} is not supported; {remedy}", name, "unsupported_parameter")
    unknown = next((name for name in request.include if name not in _INCLUDES), None)
    if unknown is not None:
        raise RequestError(f"include {shown(unknown)} is not supported; use {LOGPROBS!r}", "include")


def _as_chat(request: ResponsesRequest) -> dict[str, Any]:
    return {
        "messages": input_messages(request.input, request.instructions),
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": LOGPROBS in request.include or request.top_logprobs > 0,
        "top_logprobs": request.top_logprobs or None,
        "tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)],
        "tool_choice": _tool_choice(request.tool_choice),
        "reasoning_effort": request.reasoning.effort,
        "response_format": _response_format(request.text.format),
    }


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A function in chat form, with a nested ``function`` object."""
    if tool.get("type") != "function":
        raise RequestError(f"{where} has type {shown(tool.get('type'))}; only 'function' is supported", where)
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}


def input_messages(source: str | list[dict[str, Any]], instructions: str | None) -> list[Message]:
    """Convert the input; consecutive items of the assistant become one message. Raises RequestError."""
    messages: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(source, str):
        return [*messages, {"role": "user", "content": source}]
    if not source:
        raise RequestError("input is empty; give a text or at least one item", "input")
    if len(source) > MAX_INPUT_ITEMS:
        raise RequestError(f"input has {len(source)} items; the limit is {MAX_INPUT_ITEMS}, send fewer", "input")
    for index, item in enumerate(source):
        _add(messages, item, f"input[{index}]")
    return messages


def _add(messages: list[Message], item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message" if "role" in item else None)
    match kind:
        case "message":
            _add_message(messages, item, where)
        case "reasoning":
            _assistant(messages, "reasoning")["reasoning"] = _reasoning(item, where)
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
            messages.append(output)
        case "item_reference":
            raise RequestError(f"{where}: responses are not stored; send the item itself", where)
        case _:
            kinds = "message, reasoning, function_call, function_call_output"
            raise RequestError(f"{where} has type {shown(kind)}; use one of {kinds}", where)


def _add_message(messages: list[Message], item: dict[str, Any], where: str) -> None:
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        raise RequestError(f"{where}.role must be 'user', 'assistant', 'system' or 'developer'", where)
    if role == "assistant":
        _assistant(messages, "content", "tool_calls")["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _assistant(messages: list[Message], *unset: str) -> Message:
    """The last message if it is the assistant's and has none of the fields ``unset``, else a new one."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in unset):
        messages.append({"role": "assistant"})
    return messages[-1]


def _reasoning(item: dict[str, Any], where: str) -> str:
    parts = item.get("content") or item.get("summary") or []
    texts = []
    for part in parts if isinstance(parts, list) else [parts]:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise RequestError(f"{where}: reasoning must be a list of parts with text", where)
        texts.append(part["text"])
    return "".join(texts)
