"""Builds the messages of a chat from the parts of another protocol's conversation.

Neighbours of one role become one message: many templates refuse two in a row. Instructions at the beginning are one
system message; later ones are added to the end of the message before them, so that the cached prefix stays valid and
templates that allow a system message only in front render them.

A part is a text or an image. A content of texts alone becomes one text; beside images it stays a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from router.text.chat.image_parts import ImagePart, Part

Message = dict[str, Any]

_TEXTS = ("content", "reasoning")
_BETWEEN = "\n"  # texts of neighbouring parts


class Conversation:
    """``messages`` have lists of parts as content and reasoning, so that many parts are joined once."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._held: list[Part] = []  # instructions between a call and its result

    def joined(self) -> list[Message]:
        """Return the messages with texts, or with lists of text parts and ImageParts."""
        self._add_held()
        return [
            {name: _joined(value) if name in _TEXTS else value for name, value in message.items()}
            for message in self.messages
        ]

    @property
    def has_open_calls(self) -> bool:
        """Whether results of the last message's calls must follow."""
        return bool(self.messages) and "tool_calls" in self.messages[-1]

    def add_instructions(self, *parts: Part) -> None:
        """Add parts of the system where they change no earlier part of the prompt."""
        if parts in ((), ("",)):
            return
        if self.has_open_calls:
            self._held += parts
            return
        self._add_held()
        if not self.messages:
            self._last("system")["content"] = [*parts]
        elif self.messages[-1]["role"] == "assistant":
            self._last("user")["content"] = [*parts]
        else:  # after tool results, too: some templates drop the reasoning before the last user message
            self.messages[-1]["content"] += parts

    def add_user(self, *parts: Part) -> None:
        self._last("user").setdefault("content", []).extend(parts)
        self._add_held()

    def add_result(self, call_id: str, *parts: Part) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": [*parts]})

    def begin_assistant(self) -> Message:
        """Return the message of the assistant that the next parts belong to."""
        if not self.has_open_calls:
            self._add_held()
        return self._last("assistant")

    def add_content(self, *parts: Part) -> None:
        self.begin_assistant().setdefault("content", []).extend(parts)

    def add_reasoning(self, text: str) -> None:
        self.begin_assistant().setdefault("reasoning", []).append(text)

    def add_call(self, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.begin_assistant().setdefault("tool_calls", []).append(call)

    def _add_held(self) -> None:
        held = self._held
        self._held = []
        if not held:
            return
        if self.messages[-1]["role"] == "assistant":
            self._last("user")["content"] = held
        else:
            self.messages[-1]["content"] += held

    def _last(self, role: str) -> Message:
        """Return the last message if it has the role, else a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role})
        return self.messages[-1]


def _joined(parts: Sequence[Part]) -> str | list[Any]:
    return list(_runs(parts)) if any(isinstance(part, ImagePart) for part in parts) else _BETWEEN.join(map(str, parts))


def _runs(parts: Sequence[Part]) -> Iterator[Any]:
    """Yield images, and the texts between them as one part each."""
    for are_images, run in groupby(parts, lambda part: isinstance(part, ImagePart)):
        if are_images:
            yield from run
        else:
            yield {"type": "text", "text": _BETWEEN.join(map(str, run))}
