"""What to look for in the output of a chat request."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdserve.errors import RequestError
from router.text.chat.dialect import Dialect, Opening
from router.text.chat.pieces import OutputParser
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
