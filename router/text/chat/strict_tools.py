"""Grammars of tool calls under ``tool_choice`` "auto": in free text, for ``strict`` functions, or in place of an answer
by a response format.

    start: called* TEXT              called: text up to the marker that precedes calls, and the calls
    start: next+                     calls alone; next: the marker after at most two blanks, and the calls
    start: thought output | called … reasoning up to its end or, as the parser reads it, up to a call

From a marker on, the output has to be a call as the model's tool parser expects it. Arguments follow the schema of a
strict function; those of others are any object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from router.text.chat.tool_grammar import Marker, arguments_schema
from router.text.chat.tools import ToolUse
from router.text.structured.work_budget import Budget

MarkerOf = Callable[[str], Marker]  # marker by its text


class Reasoning(msgspec.Struct, frozen=True):
    """The markers of reasoning, and whether the prompt ends with the start marker."""

    start: Marker
    end: Marker
    opened: bool


class Frame(msgspec.Struct, frozen=True):
    """Parts of an output beside calls: free text, unless calls are ``alone``; reasoning before.

    ``or_answer``: the output may follow the grammar of this name in place of calls.
    """

    alone: bool = False
    or_answer: bool = False
    reasoning: Reasoning | None = None


StrictGrammar = Callable[[ToolUse, MarkerOf, Frame, Budget], str]  # in Lark

ANY_OBJECT = '{"type": "object"}'
TEXT = "TEXT: /(?s:.*)/"
BLANKS = "BLANKS: /[ \\t\\r\\n]{0,2}/"  # blanks that the parsers skip


def has_strict(use: ToolUse) -> bool:
    """Whether a function is strict, and calls are not forced anyway."""
    return not use.must_call and any(tool["function"].get("strict") for tool in use.tools)


def calls_or_answer(calls: str, answer: str) -> str:
    """Return a grammar of calls, in Lark and framed ``or_answer``, with that of the answer, in Lark or serialized."""
    body = json.loads(answer) if answer.startswith("{") else {"grammars": [{"lark_grammar": answer}]}
    first, *others = body["grammars"]
    grammars = [{"lark_grammar": calls}, {**first, "name": "answer"}, *others]
    return msgspec.json.encode({**body, "grammars": grammars}).decode()


def hermes_grammar(use: ToolUse, marker: MarkerOf, frame: Frame, budget: Budget) -> str:
    calls = call_objects(use, "arguments", budget)
    body = f"body: BLANKS call BLANKS {marker('</tool_call>').term}"
    return lark(*framed(use, {"body": marker("<tool_call>")}, frame), body, *calls)


def llama_grammar(use: ToolUse, marker: MarkerOf, frame: Frame, budget: Budget) -> str:
    """An output that begins with a brace, or with one in a bracket, is a list of calls."""
    tag = marker("<|python_tag|>")
    more = "(/;?[ \\t\\r\\n]{0,2}/ call)*" if use.parallel else ""
    if frame.alone:
        output = f"output: ({tag.term})? call {more}" + (" | @answer" if frame.or_answer else "")
        calls = _call_schemas(use, "parameters", budget)
    else:
        output = "output: FREE | body | begin_free body again"
        calls = call_objects(use, "parameters", budget)
    return lark(
        *_after_reasoning("called again", frame.reasoning),
        output,
        "called: begin body",
        "again: BLANKS" if frame.alone else "again: called* TEXT" if use.parallel else "again: TEXT",
        begin_rule("begin_free", "FREE", tag),
        begin_rule("begin", "TEXT", tag),
        f"body: call {more}",
        "FREE: /\\s*([^\\[{\\s](?s:.*)|\\[\\s*([^{\\s](?s:.*))?)?/",
        TEXT,
        BLANKS,
        *calls,
    )


def mistral_grammar(use: ToolUse, marker: MarkerOf, frame: Frame, budget: Budget) -> str:
    """A list of calls, which models write with an id behind the arguments, or a name and arguments since v11."""
    more = "(/, ?/ call)*" if use.parallel else ""
    between = "".join(
        f"({tag.term}{chars})? "
        for tag, chars in ((marker("[CALL_ID]"), " /[A-Za-z0-9]{1,32}/"), (marker("[ARGS]"), ""))
        if tag.token_id is not None
    )
    named = [f"named_{index}: {json.dumps(name)} {between}arguments_{index}" for index, name in enumerate(use.names)]
    return lark(
        *framed(use, {"body": marker("[TOOL_CALLS]")}, frame),
        f'body: BLANKS "[" call {more} "]" | BLANKS named',
        alternatives("named", len(named)),
        *named,
        *call_objects(use, "arguments", budget, behind="CALL_ID?"),
        'CALL_ID: /, "id": "[A-Za-z0-9]{1,32}"/',
    )


def deepseek_grammar(use: ToolUse, marker: MarkerOf, frame: Frame, budget: Budget) -> str:
    """Calls of DeepSeek-V3 and R1: JSON in a code block."""
    return _deepseek(use, marker, frame, budget, around=("function", "\n```json\n", "\n```"))


def deepseek_v31_grammar(use: ToolUse, marker: MarkerOf, frame: Frame, budget: Budget) -> str:
    """Calls of DeepSeek-V3.1."""
    return _deepseek(use, marker, frame, budget, around=("", "", ""))


def _deepseek(use: ToolUse, marker: MarkerOf, frame: Frame, budget: Budget, *, around: tuple[str, str, str]) -> str:
    """``around``: the text before the separator, else the name is there; the texts before and behind the arguments."""
    kind, before, behind = around
    separator = marker("<｜tool▁sep｜>").term
    more = "(BLANKS call)*" if use.parallel else ""
    begin = marker("<｜tool▁call▁begin｜>")
    end = marker("<｜tool▁call▁end｜>").term
    lines = []
    for index, tool in enumerate(use.tools):
        name = tool["function"]["name"]
        opening = (
            f"{json.dumps(kind)} {separator} {json.dumps(name + before)}" if kind else f"{json.dumps(name)} {separator}"
        )
        lines.append(f"named_{index}: {opening} arguments_{index} {json.dumps(behind) if behind else ''}")
    return lark(
        *framed(use, {"body": marker("<｜tool▁calls▁begin｜>"), "bare": begin}, frame),
        f"body: BLANKS {begin.term} bare",
        f"bare: named {end} {more} BLANKS {marker('<｜tool▁calls▁end｜>').term}",
        f"call: {begin.term} named {end}",
        alternatives("named", len(use.tools)),
        *lines,
        *(f"arguments_{index}: %json {_schema(tool['function'], budget)}" for index, tool in enumerate(use.tools)),
    )


def framed(use: ToolUse, bodies: Mapping[str, Marker], frame: Frame) -> Iterator[str]:
    """Yield ``start``, its rules and the terminals TEXT and BLANKS.

    ``bodies``: the rules of calls, each with the marker before it. Calls alone begin with the first marker.
    """
    yield from (begin_rule(f"begin_{body}", "TEXT", marker) for body, marker in bodies.items())
    yield "called: " + " | ".join(f"begin_{body} {body}" for body in bodies)
    body, marker = next(iter(bodies.items()))
    yield f"next: BLANKS {marker.term} {body}"
    if frame.alone:
        more = "next*" if use.parallel else ""
        text = "BLANKS"
        yield f"output: next {more}" + (" | @answer" if frame.or_answer else "")
    else:
        more = "called*" if use.parallel else ""
        text = "TEXT"
        yield f"output: called{'*' if use.parallel else '?'} TEXT"
    behind = more
    if frame.reasoning is not None and frame.reasoning.end.token_id is not None:  # an end marker behind a call
        behind = f"{more} ({text} {frame.reasoning.end.term} {more})?"
    yield from _after_reasoning(f"called {behind} {text}", frame.reasoning)
    yield TEXT
    yield BLANKS


def _after_reasoning(called: str, reasoning: Reasoning | None) -> Iterator[str]:
    """Yield ``start``: ``output`` behind the reasoning, or ``called`` in it."""
    if reasoning is None:
        yield "start: output"
        return
    begun = f"(thought newlines output | {called})"
    yield f"start: {begun}" if reasoning.opened else f"start: {reasoning.start.term} {begun} | output"
    yield begin_rule("thought", "TEXT", reasoning.end)
    yield "newlines: /\\n{0,2}/"


def begin_rule(name: str, text: str, marker: Marker, regex: str = "(?s:.*)") -> str:
    """A rule for text up to a marker. It ends with the first occurrence, so that no other rule takes the marker.

    ``text`` is a terminal, and ``regex`` what it matches.
    """
    if marker.before:  # llguidance's lexer takes ``before`` as part of the text
        terminal = f"{name.upper()}_TEXT"
        before = re.escape(marker.before).replace("/", r"\/")
        return f"{name}: {terminal} {marker.term_after_text}\n{terminal}: /{regex}{before}/"
    lazy = "[lazy]" if marker.token_id is None else ""
    return f"{name}{lazy}: {text} {marker.term}"


def call_objects(use: ToolUse, key: str, budget: Budget, behind: str = "") -> Sequence[str]:
    """Rules ``call`` for an object with name and arguments, and ``arguments_0`` … for the arguments alone.

    ``behind`` are terms between the arguments and the end of the object.
    """
    lines = [alternatives("call", len(use.tools))]
    for index, tool in enumerate(use.tools):
        function = tool["function"]
        opening = f'{{"name": {json.dumps(function["name"])}, "{key}": '
        lines.append(f'call_{index}: {json.dumps(opening)} arguments_{index} {behind} "}}"')
        lines.append(f"arguments_{index}: %json {_schema(function, budget)}")
    return lines


def _call_schemas(use: ToolUse, key: str, budget: Budget) -> Sequence[str]:
    """Rules ``call`` like those of ``call_objects``, all of it JSON.

    llguidance's lexer takes the longest lexeme and never returns: after the brace of a literal an answer that begins
    with a brace, too, would be lost. In JSON all lexemes are alike.
    """
    lines = [alternatives("call", len(use.tools))]
    for index, tool in enumerate(use.tools):
        function = tool["function"]
        properties = {
            "name": {"const": function["name"]},
            key: _moved(json.loads(_schema(function, budget)), f"#/properties/{key}"),
        }
        schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        budget.spend_value(schema)
        lines.append(f"call_{index}: %json {json.dumps(schema)}")
    return lines


def _schema(function: dict[str, Any], budget: Budget) -> str:
    budget.spend()
    return arguments_schema(function, budget) if function.get("strict") else ANY_OBJECT


def _moved(schema: Any, to: str) -> Any:
    """Return a schema whose references hold at ``to`` in another document."""
    if isinstance(schema, list):
        return [_moved(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: value if name in ("const", "enum") else _moved(value, to) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved


def alternatives(name: str, count: int) -> str:
    return f"{name}: " + " | ".join(f"{name}_{index}" for index in range(count))


def lark(*lines: str) -> str:
    return "\n".join(lines) + "\n"
