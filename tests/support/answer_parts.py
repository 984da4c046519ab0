"""Reasoning, content and calls of an answer, of each protocol, whole or from the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from model_texts import arguments_of

Parts = tuple[str, str, list[tuple[str, Any]]]


class _Parts:
    def __init__(self) -> None:
        self.reasoning = self.content = ""
        self.calls: list[list[Any]] = []

    def whole(self) -> Parts:
        return self.reasoning, self.content, [(name, arguments_of(arguments)) for name, arguments in self.calls]


def events_of(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.decode().splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def chat_parts(data: bytes, stream: bool) -> Parts:
    parts = _Parts()
    messages = [event["choices"][0]["delta"] for event in events_of(data)] if stream else []
    for message in messages or [json.loads(data)["choices"][0]["message"]]:
        parts.reasoning += message.get("reasoning_content") or ""
        parts.content += message.get("content") or ""
        for call in message.get("tool_calls") or ():
            if name := call["function"].get("name"):
                parts.calls.append([name, ""])
            parts.calls[-1][1] += call["function"]["arguments"]
    return parts.whole()


def messages_parts(data: bytes, stream: bool) -> Parts:
    parts = _Parts()
    for block in [] if stream else json.loads(data)["content"]:
        match block["type"]:
            case "thinking":
                parts.reasoning += block["thinking"]
            case "text":
                parts.content += block["text"]
            case _:
                cut_off = block["input"].get("INVALID_JSON")
                parts.calls.append([block["name"], cut_off or json.dumps(block["input"])])
    for event in events_of(data) if stream else ():
        match event:
            case {"type": "content_block_start", "content_block": {"type": "tool_use", "name": name}}:
                parts.calls.append([name, ""])
            case {"type": "content_block_delta", "delta": {"thinking": text}}:
                parts.reasoning += text
            case {"type": "content_block_delta", "delta": {"text": text}}:
                parts.content += text
            case {"type": "content_block_delta", "delta": {"partial_json": text}}:
                parts.calls[-1][1] += text
    return parts.whole()


def responses_parts(data: bytes, stream: bool) -> Parts:
    parts = _Parts()
    for item in [] if stream else json.loads(data)["output"]:
        match item["type"]:
            case "reasoning":
                parts.reasoning += "".join(part["text"] for part in item["content"])
            case "message":
                parts.content += "".join(part["text"] for part in item["content"])
            case _:
                parts.calls.append([item["name"], item["arguments"]])
    for event in events_of(data) if stream else ():
        match event:
            case {"type": "response.output_item.added", "item": {"type": "function_call", "name": name}}:
                parts.calls.append([name, ""])
            case {"type": "response.reasoning_text.delta", "delta": text}:
                parts.reasoning += text
            case {"type": "response.output_text.delta", "delta": text}:
                parts.content += text
            case {"type": "response.function_call_arguments.delta", "delta": text}:
                parts.calls[-1][1] += text
    return parts.whole()


PARTS = {
    "/v1/chat/completions": chat_parts,
    "/v1/messages": messages_parts,
    "/v1/responses": responses_parts,
}
