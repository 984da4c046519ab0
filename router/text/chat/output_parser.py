"""The deltas that an output parser returns: content, reasoning and tool calls, in the order they were written."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from io import StringIO
from typing import Protocol

import msgspec


class DeltaKind(Enum):
    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"  # begin of a tool call; the text is the function's name
    ARGUMENTS = "arguments"  # more arguments of the latest call


class OutputDelta(msgspec.Struct, frozen=True):
    kind: DeltaKind
    text: str


class OutputParser(Protocol):
    """Parses the text of one choice. The joined deltas do not depend on how the text was split."""

    @property
    def reasoning(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""

    @property
    def num_reasoned(self) -> int:
        """Characters at the beginning that are surely reasoning, with its markers."""

    @property
    def reasoning_end(self) -> int | None:
        """Characters up to the content or the call behind the reasoning; None: not yet known."""

    def push(self, text: str) -> list[OutputDelta]:
        """Return the deltas that this text completes."""

    def flush(self, finished: bool = False) -> list[OutputDelta]:
        """Return the held-back deltas at the end of the text. ``finished``: the model ended the text, not a limit."""


class ToolCall(msgspec.Struct, frozen=True):
    """``arguments`` is JSON, exactly as the model wrote it."""

    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True):
    """The whole output of a choice."""

    content: str
    reasoning: str
    calls: list[ToolCall]


class MessageBuilder:
    """Joins the deltas of a choice as they arrive."""

    def __init__(self) -> None:
        self._content = StringIO()
        self._reasoning = StringIO()
        self._calls: list[tuple[str, StringIO]] = []  # name and arguments

    def add(self, deltas: Iterable[OutputDelta]) -> None:
        for delta in deltas:
            match delta.kind:
                case DeltaKind.CONTENT:
                    self._content.write(delta.text)
                case DeltaKind.REASONING:
                    self._reasoning.write(delta.text)
                case DeltaKind.CALL:
                    self._calls.append((delta.text, StringIO()))
                case DeltaKind.ARGUMENTS:
                    self._calls[-1][1].write(delta.text)

    def message(self) -> Message:
        calls = [ToolCall(name, arguments.getvalue()) for name, arguments in self._calls]
        return Message(self._content.getvalue(), self._reasoning.getvalue(), calls)
