"""Messages in the forms that chat templates take.

Templates expect different messages, and refuse or drop others. What can be known from a template's source is adapted
here, so that a conversation which one model can continue does not end with another:

    null fields                   dropped: templates test whether a field is there
    no content beside calls       null, where the template tests that
    reasoning                     under each of its common names
    role developer                system, where the template does not know it
    arguments of calls            an object that also concatenates with text, as DeepSeek-V3.1's template does
    harmony (gpt-oss)             one call per message, with its result behind it; content before a call is reasoning
    one call per message          so in Llama 3.1 to 3.3, whose templates refuse more
    calls without content only    content in a message before them, where the template drops the calls of others (R1)
    ids of calls                  nine letters and digits, where the template demands them (Mistral)
    reasoning as a chunk          in the content, where the template reads it there (Ministral 3)
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_HARMONY_SIGN = "<|channel|>analysis"
_NULL_CONTENT = re.compile(r"\bcontent(['\"]\])? is (not )?none")
_CALLS_WITHOUT_CONTENT = re.compile(r"assistant['\"] and message(\.content|\[['\"]content['\"]\]) is none")
_ONE_CALL = re.compile(r"not \w+\.tool_calls *\| *length == 1\b")
_NINE_CHARACTERS = re.compile(r"id *\| *length != 9\b")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_THINKING_CHUNK = re.compile(r"== *['\"]thinking['\"]")


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
    if _THINKING_CHUNK.search(source):
        chat = [_with_thinking_chunk(message) for message in chat]
    if _NINE_CHARACTERS.search(source):
        chat = [_with_short_ids(message) for message in chat]
    if _CALLS_WITHOUT_CONTENT.search(source):
        chat = [part for message in chat for part in _content_before_calls(message)]
    if _NULL_CONTENT.search(source):
        chat = [{"content": None, **message} if "tool_calls" in message else message for message in chat]
    if _HARMONY_SIGN in source:
        chat = [_with_one_text(message) if message.get("tool_calls") else message for message in chat]
        return list(_with_one_call(chat))
    return list(_with_one_call(chat)) if _ONE_CALL.search(source) else chat


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


def _with_thinking_chunk(message: Message) -> Message:
    """Return the message with its reasoning as the first chunk of its content."""
    reasoning = message.get("reasoning_content")
    content = message.get("content", "")
    if message.get("role") != "assistant" or not reasoning or not isinstance(content, str):
        return message
    texts = [{"type": "text", "text": content}] if content else []
    return {**message, "content": [{"type": "thinking", "thinking": reasoning}, *texts]}


def _with_short_ids(message: Message) -> Message:
    fields = _with_short_id(message, "tool_call_id")
    if "tool_calls" in fields:
        calls = fields["tool_calls"]
        fields["tool_calls"] = [_with_short_id(call, "id") if isinstance(call, dict) else call for call in calls]
    return fields


def _with_short_id(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the values with an id of nine letters and digits, which is the given one where it has that form."""
    call_id = values.get(name)
    if not isinstance(call_id, str) or _SHORT_ID.fullmatch(call_id):
        return dict(values)
    return {**values, name: hashlib.sha256(call_id.encode()).hexdigest()[:9]}


def _content_before_calls(message: Message) -> Sequence[Message]:
    if not (message.get("content") and message.get("tool_calls")):
        return [message]
    before = {name: value for name, value in message.items() if name != "tool_calls"}
    return [before, {"role": message["role"], "tool_calls": message["tool_calls"]}]


def _with_one_call(chat: Sequence[Message]) -> Iterator[Message]:
    """Yield messages that have one call at most, each with its result behind it.

    gpt-oss's template renders the first call of a message only, and names a result after the call before it.
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
            yield {**message, "tool_calls": [call]}
            message = {"role": message["role"]}
            yield from (result for result in results if _answers(result, call))
        yield from (result for result in results if not any(_answers(result, call) for call in calls))


def _answers(result: Message, call: Any) -> bool:
    return isinstance(call, dict) and "id" in call and result.get("tool_call_id") == call["id"]


def _with_one_text(message: Message) -> Message:
    """Return a message with calls with its content behind its reasoning: gpt-oss's template refuses both texts."""
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
