"""Grammars of outputs in the harmony format (harmony_parser.py): reasoning, and a call or an answer.

    start: analysis? (call | answer)

A message of the model is one call. Its arguments follow the function's schema if calls are forced or the function is
strict; those of others are any object.
"""

from __future__ import annotations

import json

import msgspec

from router.text.chat.strict_tools import ANY_OBJECT, TEXT, Frame, MarkerOf, alternatives, begin_rule, lark
from router.text.chat.tool_grammar import arguments_schema
from router.text.chat.tools import ToolUse
from router.text.structured.work_budget import Budget


def harmony_grammar(use: ToolUse, marker: MarkerOf, answer: str | None, budget: Budget) -> str:
    """Return the grammar of an output. ``answer``: that of the final message; "": any text; None: a call must come."""
    rules = [f"start: {_analysis(marker)}? output", TEXT, begin_rule("thought", "TEXT", marker("<|end|>"))]
    outputs = []
    tools = [tool for tool in use.tools if not use.named or tool["function"]["name"] == use.named]
    if tools:
        outputs.append("call")
        rules.append(alternatives("call", len(tools)))
    for index, tool in enumerate(tools):
        budget.spend()
        function = tool["function"]
        recipient = f"commentary to=functions.{function['name']} "
        header = f"{marker('<|channel|>').term} {json.dumps(recipient)}"
        header += f' {marker("<|constrain|>").term} "json" {marker("<|message|>").term}'
        held = use.must_call or function.get("strict")
        rules.append(f"call_{index}: {header} arguments_{index}")
        rules.append(f"arguments_{index}: %json {arguments_schema(function, budget) if held else ANY_OBJECT}")
    if answer is not None:
        outputs.append("final")
        final = f'{marker("<|channel|>").term} "final" {marker("<|message|>").term}'
        rules.append(f"final: {final} {'@answer' if answer else 'TEXT'}")
    rules.append(f"output: {' | '.join(outputs)}")
    text = lark(*rules)
    if not answer:
        return text
    body = json.loads(answer) if answer.startswith("{") else {"grammars": [{"lark_grammar": answer}]}
    first, *others = body["grammars"]
    grammars = [{"lark_grammar": text}, {**first, "name": "answer"}, *others]
    return msgspec.json.encode({**body, "grammars": grammars}).decode()


def harmony_calls_grammar(use: ToolUse, marker: MarkerOf, frame: Frame, budget: Budget) -> str:
    return harmony_grammar(use, marker, None if frame.alone else "", budget)


def _analysis(marker: MarkerOf) -> str:
    header = f'{marker("<|channel|>").term} "analysis" {marker("<|message|>").term}'
    return f'({header} thought {marker("<|start|>").term} "assistant")'
