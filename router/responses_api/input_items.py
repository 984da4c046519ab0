"""The input items of /v1/responses and the chat messages that they become."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from pdserve.errors import RequestError, shown
from router.responses_api.compaction import PROMPT, decode_summary
from router.text.chat.messages import join_parts

Message = dict[str, Any]
Item = dict[str, Any]

MAX_INPUT_ITEMS = 10_000
_ROLES = ("user", "assistant", "system", "developer")


def input_items(source: str | list[Item]) -> list[Item]:
    return [{"role": "user", "content": source}] if isinstance(source, str) else source


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"


def reference_of(item: Item) -> str | None:
    """Return the id of the stored item that ``item`` stands for. Raises RequestError."""
    if item.get("type") != "item_reference" and not ("id" in item and len(item) == 1):
        return None
    if not isinstance(item.get("id"), str):
        raise RequestError("an item_reference needs the id of an item", "input")
    return str(item["id"])


def input_messages(items: list[Item], instructions: str | None) -> list[Message]:
    """Convert items to messages; consecutive items of the assistant become one message. Raises RequestError."""
    if not items:
        raise RequestError("input is empty; give a text or at least one item", "input")
    if len(items) > MAX_INPUT_ITEMS:
        raise RequestError(f"the input has {len(items)} items; the limit is {MAX_INPUT_ITEMS}, send fewer", "input")
    messages: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
    call_ids: set[str] = set()
    for index, item in enumerate(items):
        _add(messages, call_ids, item, where=f"input[{index}]")
    return messages


def _add(messages: list[Message], call_ids: set[str], item: Item, where: str) -> None:
    kind = item.get("type", "message" if "role" in item else None)
    match kind:
        case "message":
            _add_message(messages, item, where)
        case "reasoning":
            _assistant(messages, "reasoning")["reasoning"] = _reasoning(item, where)
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call_ids.add(call_id := _call_id(item, where))
            _assistant(messages).setdefault("tool_calls", []).append(
                {"id": call_id, "type": "function", "function": function}
            )
        case "function_call_output":
            if (call_id := _call_id(item, where)) not in call_ids:
                text = f"no function_call before {where} has its call_id {shown(call_id)}; send that call, too"
                raise RequestError(text, where)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": join_parts(item.get("output"), where)})
        case "compaction":
            messages.append({"role": "user", "content": PROMPT})
            _assistant(messages)["content"] = decode_summary(item.get("encrypted_content"), where)
        case _:
            kinds = "message, reasoning, function_call, function_call_output, item_reference, compaction"
            raise RequestError(f"{where} has type {shown(kind)}; use one of {kinds}", where)


def _add_message(messages: list[Message], item: Item, where: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise RequestError(f"{where}.role must be 'user', 'assistant', 'system' or 'developer'", where)
    content = join_parts(item.get("content"), where)
    if role == "assistant":
        _assistant(messages, "content", "tool_calls")["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _call_id(item: Item, where: str) -> str:
    call_id = item.get("call_id")
    if not isinstance(call_id, str):
        raise RequestError(f"{where}.call_id must be a string", where)
    return call_id


def _assistant(messages: list[Message], *unset: str) -> Message:
    """The last message if it is the assistant's and has none of the fields ``unset``, else a new one."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in unset):
        messages.append({"role": "assistant"})
    return messages[-1]


def _reasoning(item: Item, where: str) -> str:
    parts = item.get("content") or item.get("summary") or []
    texts = []
    for part in parts if isinstance(parts, list) else [parts]:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise RequestError(f"{where}: reasoning must be a list of parts with text", where)
        texts.append(part["text"])
    return "".join(texts)
