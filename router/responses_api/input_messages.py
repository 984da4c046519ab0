"""From the input items of /v1/responses to chat messages."""

from __future__ import annotations

from typing import Any

from pdserve.errors import RequestError

Message = dict[str, Any]


def input_messages(source: str | list[dict[str, Any]], instructions: str | None) -> list[Message]:
    """Convert the input. Consecutive reasoning, text and calls of the assistant become one message.

    Raises RequestError that names the item.
    """
    messages: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(source, str):
        return [*messages, {"role": "user", "content": source}]
    if not source:
        raise RequestError("input is empty; give a text or at least one item", "input")
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
            raise RequestError(f"{where} has type {kind!r}; use one of {kinds}", where)


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
