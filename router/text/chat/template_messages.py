"""Messages in the forms that chat templates take.

Templates expect different messages, and refuse or drop others. What can be known from a template's source is adapted
here, so that a conversation which one model can continue does not end with another:

    null fields                   dropped: templates test whether a field is there
    no content beside calls       null, where the template tests that
    reasoning                     under each of its common names
    role developer                system, where the template does not know it
    arguments of calls            an object that also concatenates with text, as DeepSeek-V3.1's template does
    harmony (gpt-oss)             one call per message, with its result behind it; content before a call is reasoning
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_HARMONY_SIGN = "<|channel|>analysis"
_NULL_CONTENT = re.compile(r"\bcontent(['\"]\])? is (not )?none")


class Arguments(dict[str, Any]):
    """The arguments of a call. With ``+`` they are their JSON text: some templates take an object, others a text."""

    def __add__(self, text: str) -> str:
        return _json(self) + text

    def __radd__(self, text: str) -> str:
        return text + _json(self)


def template_messages(messages: Sequence[Mapping[str, Any]], source: str) -> list[Message]:
    """Return new messages for the template with this source."""
    has_developer = "developer" in source
    chat = [_normalized(message, has_developer) for message in messages]
    if _NULL_CONTENT.search(source):
        chat = [{"content": None, **message} if "tool_calls" in message else message for message in chat]
    return list(_in_channels(chat)) if _HARMONY_SIGN in source else chat


def _normalized(message: Mapping[str, Any], has_developer: bool) -> Message:
    fields = {name: value for name, value in message.items() if value is not None}
    if fields.get("role") == "developer" and not has_developer:
        fields["role"] = "system"
    if "tool_calls" in fields:
        fields["tool_calls"] = [_with_arguments(call) for call in fields["tool_calls"]]
    reasoning = next((fields[name] for name in _REASONING_NAMES if name in fields), None)
    if reasoning is not None:
        return {"thinking": reasoning, **fields, "reasoning_content": reasoning}
    return fields


def _with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": Arguments(function["arguments"])}}


def _in_channels(chat: Sequence[Message]) -> Iterator[Message]:
    """Yield messages of which each has one call at most, and content or reasoning where it has a call.

    gpt-oss's template renders the first call of a message only, names a result after the call before it, and refuses a
    call with both texts.
    """
    at = 0
    while at < len(chat):
        message = chat[at]
        at += 1
        calls = message.get("tool_calls") or []
        if not calls:
            yield message
            continue
        results = []
        while at < len(chat) and chat[at].get("role") == "tool":
            results.append(chat[at])
            at += 1
        for call in calls:
            yield {**_with_one_text(message), "tool_calls": [call]}
            message = {"role": message["role"]}
            yield from (result for result in results if _answers(result, call))
        yield from (result for result in results if not any(_answers(result, call) for call in calls))


def _answers(result: Message, call: Any) -> bool:
    return isinstance(call, dict) and "id" in call and result.get("tool_call_id") == call["id"]


def _with_one_text(message: Message) -> Message:
    content = message.get("content")
    reasoning = message.get("thinking")
    if not (content and reasoning and isinstance(content, str) and isinstance(reasoning, str)):
        return message
    both = f"{reasoning}\n\n{content}"
    return {name: value for name, value in message.items() if name != "content"} | {
        "thinking": both,
        "reasoning_content": both,
    }


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
