"""What to look for in the output of a chat request, and the outputs while they are read."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdserve.errors import RequestError
from pdserve.pb import pdserve_pb2 as pb
from router.generation.choice import Choice
from router.http.response_formats import Usage
from router.text.chat.dialect import Dialect, Opening
from router.text.chat.pieces import OutputParser, OutputPiece, PieceKind
from router.text.chat.reasoning import PlainText, ReasoningReader
from router.text.chat.tool_calls import ListReader, NamedReader
from router.text.chat.tools import ToolUse


class OutputReading(msgspec.Struct, frozen=True):
    """How the outputs of a request are read."""

    new_parser: Callable[[], OutputParser]
    new_call_id: Callable[[], str]
    markers: tuple[str, ...]  # special tokens that must not be missing in the text
    include_reasoning: bool = True


def find_reading(use: ToolUse, dialect: Dialect, opening: Opening, include_reasoning: bool) -> OutputReading | None:
    """None where output is text and nothing else.

    Raises RequestError for tools whose calls could not be told from text.
    """
    if use.tools and dialect.tools is None and not use.forced:
        remedy = "start the router with --tool-call-parser, or use tool_choice 'required'"
        raise RequestError(f"how this model writes tool calls is not known; {remedy}", "tools")
    reasoning = opening.reasoning
    if reasoning is None and not use.tools:
        return None
    markers = dialect.tools.markers if dialect.tools and use.tools else ()
    if reasoning is not None:
        markers = (*markers, reasoning.start, reasoning.end)
    return OutputReading(
        new_parser=lambda: _parser(use, dialect, opening),
        new_call_id=dialect.new_call_id,
        markers=markers,
        include_reasoning=include_reasoning,
    )


def plain_reading(dialect: Dialect) -> OutputReading:
    """Of output that is text and nothing else, for those who want pieces all the same."""
    return OutputReading(PlainText, dialect.new_call_id, markers=())


def _parser(use: ToolUse, dialect: Dialect, opening: Opening) -> OutputParser:
    calls: OutputParser = PlainText()
    if use.named:
        calls = NamedReader([use.named])
    elif use.required:
        calls = ListReader(use.names, use.parallel)
    elif use.tools:
        assert dialect.tools is not None
        calls = dialect.tools.reader(use.names, use.parallel)
    form = opening.reasoning
    return calls if form is None else ReasoningReader(form.start, form.end, opening.opened, calls)


class ReadChoice:
    """One choice of a response whose output is read."""

    def __init__(self, reading: OutputReading) -> None:
        self._parser = reading.new_parser()
        self._include_reasoning = reading.include_reasoning
        self._called = False

    def feed(self, choice: Choice, text: str, output: pb.Output, usage: Usage) -> list[OutputPiece]:
        """What this text tells. A choice that ends by itself after a call ends with "tool_calls"."""
        reasoned = self._parser.reasoning
        pieces = self._parser.push(text)
        if output.has_token and (reasoned or self._parser.reasoning):
            usage.reasoning_tokens += 1
        if choice.finish_reason:
            pieces += self._parser.flush()
        self._called = self._called or any(piece.kind is PieceKind.CALL for piece in pieces)
        if self._called and choice.finish_reason == "stop":
            choice.finish_reason = "tool_calls"
        if not self._include_reasoning:
            pieces = [piece for piece in pieces if piece.kind is not PieceKind.REASONING]
        return pieces
