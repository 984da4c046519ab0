"""Grammars of outputs that have to be tool calls, and of outputs that are held to a grammar only after reasoning."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from router.text.chat.tools import ToolUse

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class Marker(msgspec.Struct, frozen=True):
    """A text in the output; ``token_id`` is that of its token, where it is one that was added to the vocabulary.

    llguidance takes such tokens for special, and special tokens match no text.
    """

    text: str
    token_id: int | None = None

    @property
    def term(self) -> str:
        """In llguidance's Lark."""
        return json.dumps(self.text) if self.token_id is None else f"<[{self.token_id}]>"


def forced_calls_grammar(use: ToolUse) -> str:
    """Lark for what ``tool_choice`` demands: the arguments of the named function, or a list of calls.

    Each function's schema is a document of its own, so that its references are to itself.
    """
    if use.named:
        function = next(tool["function"] for tool in use.tools if tool["function"]["name"] == use.named)
        return f"start: arguments\narguments: %json {_schema(function)}\n"
    more = '(", " call)*' if use.parallel else ""
    lines = [f'start: "[" call {more} "]"', "call: " + " | ".join(f"call_{index}" for index in range(len(use.tools)))]
    for index, tool in enumerate(use.tools):
        function = tool["function"]
        opening = f'{{"name": {json.dumps(function["name"])}, "arguments": '
        lines.append(f'call_{index}: {json.dumps(opening)} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: %json {_schema(function)}")
    return "\n".join(lines) + "\n"


def _schema(function: dict[str, Any]) -> str:
    schema = function.get("parameters") or _NO_PARAMETERS
    return msgspec.json.encode({"type": "object", **schema}).decode()


def after_reasoning(grammar: str, start: Marker, end: Marker, opened: bool) -> str:
    """``grammar`` where reasoning may come first: from ``start`` to ``end``, or to ``end`` if the prompt opened it.

    Newlines may follow the end, as the templates of such models write them.
    """
    body = json.loads(grammar) if grammar.startswith("{") else {"grammars": [{"lark_grammar": grammar}]}
    first, *others = body["grammars"]
    reasoning = "reasoning newlines" if opened else f"({start.term} reasoning newlines)?"
    if end.token_id is None:
        rule = f"reasoning[suffix={end.term}]: /(?s:.*)/"
    else:
        rule = f"reasoning: anything {end.term}\nanything: /(?s:.*)/"
    wrapper = f"start: {reasoning} @rest\n{rule}\nnewlines: /\\n{{0,2}}/\n"
    grammars = [{"lark_grammar": wrapper}, {**first, "name": "rest"}, *others]
    return msgspec.json.encode({**body, "grammars": grammars}).decode()
