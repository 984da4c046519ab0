"""Grammars that force tool calls, and grammars that begin after reasoning."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from pdserve.grammar import check_size
from router.text.chat.tools import ToolUse
from router.text.structured.normalized_schemas import held_schema
from router.text.structured.structured_outputs import OutputGrammar, in_field, json_schema_grammar
from router.text.structured.work_budget import Budget

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class Marker(msgspec.Struct, frozen=True):
    """A text in the output; ``token_id`` is set where the text is an added token of the vocabulary.

    llguidance treats added tokens as special, and special tokens match no text. ``before`` and ``behind`` are texts
    around an added token.
    """

    text: str
    token_id: int | None = None
    before: str = ""
    behind: str = ""

    @property
    def term(self) -> str:
        """The marker in llguidance's Lark."""
        before = f"{json.dumps(self.before)} " if self.before else ""
        return before + self.term_after_text

    @property
    def term_after_text(self) -> str:
        """The marker without the text ``before`` its token."""
        if self.token_id is None:
            return json.dumps(self.text)
        return f"<[{self.token_id}]>" + (f" {json.dumps(self.behind)}" if self.behind else "")


def tool_call_grammar(use: ToolUse, budget: Budget) -> str:
    """Return Lark for the arguments of the named function, or for a list of calls.

    Each function's schema is a separate document, so that its references stay inside it. Raises RequestError and
    WorkExceeded.
    """
    if use.named:
        function = next(tool["function"] for tool in use.tools if tool["function"]["name"] == use.named)
        return f"start: arguments\narguments: %json {arguments_schema(function, budget)}\n"
    more = '(", " call)*' if use.parallel else ""
    lines = [f'start: "[" call {more} "]"', "call: " + " | ".join(f"call_{index}" for index in range(len(use.tools)))]
    for index, tool in enumerate(use.tools):
        function = tool["function"]
        opening = f'{{"name": {json.dumps(function["name"])}, "arguments": '
        lines.append(f'call_{index}: {json.dumps(opening)} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: %json {arguments_schema(function, budget)}")
    return "\n".join(lines) + "\n"


def arguments_schema(function: dict[str, Any], budget: Budget) -> str:
    """Return the JSON schema of a function's arguments. Raises RequestError for one that is too long."""
    text = budget.encoded(held_schema(_parameters(function), budget)).decode()
    check_size(text)
    return text


def parameters_grammar(function: dict[str, Any], field: str, budget: Budget) -> OutputGrammar:
    """Return the grammar of a function's arguments alone. Raises RequestError that begins with ``field``."""
    with in_field(field):
        return OutputGrammar(json_schema_grammar(_parameters(function), budget), field)


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", **(function.get("parameters") or _NO_PARAMETERS)}


def after_reasoning(grammar: str, start: Marker, end: Marker, opened: bool) -> str:
    """Let reasoning precede ``grammar``: from ``start`` to ``end``, or up to ``end`` if the prompt ``opened`` it.

    Up to two newlines may follow the end, as in the templates of such models.
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
