"""Checks chat messages and converts them to the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pdserve.errors import RequestError, shown
from router.text.json_bounds import check_json

Message = dict[str, Any]

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def check_messages(messages: Sequence[Message], images: bool = False) -> list[Message]:
    """Join content parts to text and parse the arguments of tool calls.

    ``images``: contents may have parts of type ``image``, which stay parts, with the texts beside them.
    Raises RequestError that names the message.
    """
    if not messages:
        raise RequestError("messages is empty; give at least one message", "messages")
    return [_checked(message, f"messages[{index}]", images) for index, message in enumerate(messages)]


def _checked(message: Message, where: str, images: bool) -> Message:
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError(f"{where}.role must be a string such as 'user'", where)
    if message.get("function_call") or role == "function":
        remedy = "write the call in tool_calls and its result as a message with role 'tool'"
        raise RequestError(f"{where}: functions are not supported; {remedy}", where)
    for name in ("reasoning", "reasoning_content", "name", "tool_call_id"):
        if not isinstance(message.get(name), str | None):
            raise RequestError(f"{where}.{name} must be a string", where)
    content = message.get("content")
    if images and isinstance(content, list) and any(map(is_image, content)):
        content = [part if is_image(part) else _text_part(part, where, at) for at, part in enumerate(content)]
    else:
        content = join_parts(content, where)
    checked = {**message, "content": content}
    if role == "tool" and checked["content"] is None:
        raise RequestError(f"{where}.content is missing; a message with role 'tool' holds a call's result", where)
    calls = checked.pop("tool_calls", None)
    if "content" in message and checked["content"] is None and not calls:
        checked["content"] = ""  # with null, templates would write None or fail
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls must be a list in a message with role 'assistant'", where)
        checked["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return checked


def _call(call: Any, where: str) -> Message:
    """Return the call with its arguments as an object, for templates; clients send JSON in a string.

    A string that is no JSON object becomes Anthropic's INVALID_JSON: agents send back what the model wrote.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must have a function with a name", where)
    if (call.get("type") or "function") != "function" or not isinstance(call.get("id"), str | None):
        raise RequestError(f"{where} must have type 'function' and a string as id", where)
    arguments = function.get("arguments")
    field = f"{where}.function.arguments"
    if isinstance(arguments, str):
        check_json(arguments.encode(), 0)
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = arguments
        arguments = parsed if isinstance(parsed, dict) else {"INVALID_JSON": arguments}
    if not isinstance(arguments, dict | None):
        raise RequestError(f"{field} must be a JSON object", field)
    return {**call, "type": "function", "function": {**function, "arguments": arguments or {}}}


def join_parts(content: Any, where: str = "messages") -> str | None:
    """Return the text of a message's content, or None. A newline separates parts, as in vLLM. Raises RequestError."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of parts", where)
    return "\n".join(part_text(part, where, at) for at, part in enumerate(content))


def part_text(part: Any, where: str, at: int) -> str:
    """Return the text of part ``at`` of a message's content. Raises RequestError for other parts."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind not in _TEXT_PARTS:
        remedy = "only texts are supported, and images in models that see"
        raise RequestError(f"{where}.content[{at}] has type {shown(kind)}; {remedy}", where)
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.content[{at}] is a text part without text", where)
    return text


def _text_part(part: Any, where: str, at: int) -> Message:
    return {"type": "text", "text": part_text(part, where, at)}


def is_image(part: Any) -> bool:
    """Whether a part of a content is an image, in the form of chat templates."""
    return isinstance(part, dict) and part.get("type") == "image"


def check_image_order(messages: Sequence[Message]) -> None:
    """Raise RequestError if images are not in the order of their numbers: a template shows them by their place only."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content if is_image(part))
    numbers = [part.get("number", 0) for part in parts]
    if numbers != sorted(numbers):
        raise RequestError(
            "results of tools with images are not in the order of their calls; send them in that order", "messages"
        )


def final_text(content: Any) -> str:
    """Return the last text of a content, without images."""
    if not isinstance(content, list):
        return content or ""
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    return next((text for text in reversed(texts) if isinstance(text, str)), "")
