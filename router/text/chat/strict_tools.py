"""Grammars of free text with tool calls, for ``strict`` functions under ``tool_choice`` "auto".

    start: (begin body)* TEXT      begin is text up to the marker that precedes calls; body holds the calls

From a marker on, the output has to be a call as the model's tool parser expects it. Arguments follow the schema of a
strict function; those of others are any object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from router.text.chat.tool_grammar import Marker, arguments_schema
from router.text.chat.tools import ToolUse

MarkerOf = Callable[[str], Marker]  # by text
StrictGrammar = Callable[[ToolUse, MarkerOf], str]  # in Lark

_ANY_OBJECT = '{"type": "object"}'
_TEXT = "TEXT: /(?s:.*)/"


def has_strict(use: ToolUse) -> bool:
    """Whether a function is strict, and calls are not forced anyway."""
    return not use.must_call and any(tool["function"].get("strict") for tool in use.tools)


def hermes_grammar(use: ToolUse, marker: MarkerOf) -> str:
    calls = _call_objects(use, "arguments")
    body = f"body: SPACE call SPACE {marker('</tool_call>').term}"
    return _lark(_start(use), _begin("begin", "TEXT", marker("<tool_call>")), body, "SPACE: /\\s{0,2}/", _TEXT, *calls)


def llama_grammar(use: ToolUse, marker: MarkerOf) -> str:
    """An output that begins with a brace is a list of calls."""
    tag = marker("<|python_tag|>")
    more = "(/;?\\s{0,2}/ call)*" if use.parallel else ""
    return _lark(
        "start: FREE | body | begin_free body again",
        "again: (begin body)* TEXT" if use.parallel else "again: TEXT",
        _begin("begin_free", "FREE", tag),
        _begin("begin", "TEXT", tag),
        f"body: call {more}",
        "FREE: /\\s*([^{\\s](?s:.*))?/",
        _TEXT,
        *_call_objects(use, "parameters"),
    )


def mistral_grammar(use: ToolUse, marker: MarkerOf) -> str:
    """A list of calls or, since tokenizer v11, a name and arguments."""
    more = "(/, ?/ call)*" if use.parallel else ""
    between = "".join(
        f"({each.term}{chars})? "
        for each, chars in ((marker("[CALL_ID]"), " /[A-Za-z0-9]{1,32}/"), (marker("[ARGS]"), ""))
        if each.token_id is not None
    )
    named = [f"named_{index}: {json.dumps(name)} {between}arguments_{index}" for index, name in enumerate(use.names)]
    return _lark(
        _start(use),
        _begin("begin", "TEXT", marker("[TOOL_CALLS]")),
        f'body: SPACE "[" call {more} "]" | SPACE named',
        "SPACE: / ?/",
        _alternatives("named", len(named)),
        *named,
        _TEXT,
        *_call_objects(use, "arguments"),
    )


def _start(use: ToolUse) -> str:
    return f"start: (begin body){'*' if use.parallel else '?'} TEXT"


def _begin(name: str, text: str, marker: Marker) -> str:
    """A rule for text up to a marker. It ends with the first occurrence, so that no other rule takes the marker."""
    lazy = "[lazy]" if marker.token_id is None else ""
    return f"{name}{lazy}: {text} {marker.term}"


def _call_objects(use: ToolUse, key: str) -> Sequence[str]:
    """Rules ``call`` for an object with name and arguments, and ``arguments_0`` … for the arguments alone."""
    lines = [_alternatives("call", len(use.tools))]
    for index, tool in enumerate(use.tools):
        function = tool["function"]
        opening = f'{{"name": {json.dumps(function["name"])}, "{key}": '
        lines.append(f'call_{index}: {json.dumps(opening)} arguments_{index} "}}"')
        schema = arguments_schema(function) if function.get("strict") else _ANY_OBJECT
        lines.append(f"arguments_{index}: %json {schema}")
    return lines


def _alternatives(name: str, count: int) -> str:
    return f"{name}: " + " | ".join(f"{name}_{index}" for index in range(count))


def _lark(*lines: str) -> str:
    return "\n".join(lines) + "\n"
