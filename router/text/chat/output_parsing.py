"""Selects the tool parser and the reasoning parser of a chat request."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from pdserve.errors import RequestError
from router.text.chat.families.harmony_parser import MARKERS, HarmonyParser
from router.text.chat.families.typed_values import TypedValues, typed_values
from router.text.chat.output_parser import OutputParser
from router.text.chat.parsers import ModelParsers, ReasoningState
from router.text.chat.reasoning_parser import PlainTextParser, ReasoningParser, Thinking
from router.text.chat.tool_parsers import NamedToolParser, RequiredToolParser
from router.text.chat.tools import ToolUse


class OutputParsing(msgspec.Struct, frozen=True):
    """The parsers for the outputs of a request."""

    new_parser: Callable[[], OutputParser]
    new_call_id: Callable[[], str]
    markers: tuple[str, ...]  # special tokens that the parser must see as text
    reasons: bool = False  # reasoning is parsed
    include_reasoning: bool = True
    forced: bool = False  # the output is calls; a beginning that is cut off is no content
    warnings: list[str] = []  # parts of the request without effect


def select_parsing(
    use: ToolUse,
    parsers: ModelParsers,
    state: ReasoningState,
    include_reasoning: bool,
    separate_reasoning: bool = True,
    *,
    held: bool = False,
) -> OutputParsing | None:
    """Return None where all output is plain text. Raises RequestError for tools without a tool parser.

    ``separate_reasoning`` False: reasoning and its markers stay content. ``held``: a grammar holds calls to the format.
    """
    if use.tools and parsers.tools is None and not use.must_call:
        remedy = "start the router with --tool-call-parser, or use tool_choice 'required'"
        raise RequestError(f"the router knows no tool parser for this model; {remedy}", "tools")
    if state.markers is None and not use.tools and not parsers.use_channels:
        return None
    markers = parsers.tools.markers if parsers.tools and use.tools else ()
    if parsers.use_channels:
        markers = (*markers, *MARKERS)
    if state.markers is not None:
        markers = (*markers, state.markers.start, state.markers.end)
    separated = state if separate_reasoning else ReasoningState(continued=state.continued)
    functions = typed_values(use.schemas, held)
    return OutputParsing(
        new_parser=lambda: _new_parser(use, parsers, separated, functions),
        new_call_id=parsers.new_call_id,
        markers=markers,
        reasons=separated.markers is not None,
        include_reasoning=include_reasoning,
        forced=use.must_call,
    )


def plain_text_parsing(parsers: ModelParsers) -> OutputParsing:
    """Parsing of plain text, for responses that are written from deltas."""
    return OutputParsing(PlainTextParser, parsers.new_call_id, markers=())


def _new_parser(
    use: ToolUse, parsers: ModelParsers, state: ReasoningState, functions: Mapping[str, TypedValues]
) -> OutputParser:
    if parsers.use_channels:
        names = [use.named] if use.named else use.names
        return HarmonyParser(names, use.parallel, separated=state.markers is not None, in_answer=state.continued)
    thinking = Thinking(state.markers.start, state.markers.end, state.opened) if state.markers else None
    if use.named:
        return NamedToolParser([use.named], thinking=thinking)
    if use.required:
        return RequiredToolParser(use.names, use.parallel, thinking)
    if use.tools:
        assert parsers.tools is not None
        return parsers.tools.parser(functions, use.parallel, thinking)
    return ReasoningParser(thinking) if thinking else PlainTextParser()
