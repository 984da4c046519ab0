"""The deltas that an output parser returns: content, reasoning and tool calls, in the order they were written."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import msgspec


class DeltaKind(Enum):
    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"  # a tool call begins; the text is the function's name
    ARGUMENTS = "arguments"  # more arguments of the latest call


class OutputDelta(msgspec.Struct, frozen=True):
    kind: DeltaKind
    text: str


class OutputParser(Protocol):
    """Parses the text of one choice. The joined deltas do not depend on how the text was split."""

    @property
    def reasoning(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""

    def push(self, text: str) -> list[OutputDelta]:
        """Return the deltas that this text completes."""

    def flush(self) -> list[OutputDelta]:
        """Return what was held back, at the end of the text."""


class ToolCall(msgspec.Struct, frozen=True):
    """``arguments`` is JSON, exactly as the model wrote it."""

    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True):
    """The whole output of a choice."""

    content: str
    reasoning: str
    calls: list[ToolCall]


def join_deltas(deltas: Sequence[OutputDelta]) -> Message:
    def join(kind: DeltaKind) -> str:
        return "".join(delta.text for delta in deltas if delta.kind is kind)

    calls: list[list[str]] = []  # name, then parts of the arguments
    for delta in deltas:
        if delta.kind is DeltaKind.CALL:
            calls.append([delta.text])
        elif delta.kind is DeltaKind.ARGUMENTS:
            calls[-1].append(delta.text)
    found = [ToolCall(name, "".join(arguments)) for name, *arguments in calls]
    return Message(join(DeltaKind.CONTENT), join(DeltaKind.REASONING), found)
