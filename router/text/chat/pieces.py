"""What a parser of output tells: pieces of text, of reasoning, and of tool calls, in the order they were written."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Protocol

import msgspec


class PieceKind(Enum):
    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"  # a call begins; the text is the function's name
    ARGUMENTS = "arguments"  # more of the arguments of the call that began last


class OutputPiece(msgspec.Struct, frozen=True):
    kind: PieceKind
    text: str


class OutputParser(Protocol):
    """Sorts the text of one choice. What it tells, joined, does not depend on how the text was cut up."""

    @property
    def reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""

    def push(self, text: str) -> list[OutputPiece]:
        """What has become certain with this text."""

    def flush(self) -> list[OutputPiece]:
        """What was held back, at the end of the text."""


class ToolCall(msgspec.Struct, frozen=True):
    """``arguments`` is JSON, exactly as the model wrote it."""

    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True):
    """What a choice says as a whole."""

    content: str
    reasoning: str
    calls: list[ToolCall]


def message_of(pieces: Iterable[OutputPiece]) -> Message:
    """The pieces of a choice put together."""
    texts: dict[PieceKind, list[str]] = {PieceKind.CONTENT: [], PieceKind.REASONING: []}
    calls: list[tuple[str, list[str]]] = []
    for piece in pieces:
        if piece.kind is PieceKind.CALL:
            calls.append((piece.text, []))
        elif piece.kind is PieceKind.ARGUMENTS:
            calls[-1][1].append(piece.text)
        else:
            texts[piece.kind].append(piece.text)
    return Message(
        content="".join(texts[PieceKind.CONTENT]),
        reasoning="".join(texts[PieceKind.REASONING]),
        calls=[ToolCall(name, "".join(arguments)) for name, arguments in calls],
    )
