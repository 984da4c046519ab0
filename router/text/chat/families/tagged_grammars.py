"""Grammars of the calls that tagged_tool_parsers.py parses, for strict functions (strict_tools.py).

The arguments of a strict function come in the order of its schema. A string is text up to the tag that ends its value;
other values are JSON. Arguments of other functions are any texts by any names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pdserve.errors import RequestError, shown
from router.text.chat.families.tagged_tool_parsers import CallTags
from router.text.chat.strict_tools import TEXT, MarkerOf, StrictGrammar, alternatives, begin_rule, lark, start
from router.text.chat.tool_grammar import Marker, arguments_schema
from router.text.chat.tools import ToolUse
from router.text.structured.closed_schemas import target_of
from router.text.structured.normalized_schemas import ANNOTATIONS
from router.text.structured.work_budget import Budget, check_chars

_NAME = '/[^<>"\\s]{1,64}/'  # of any argument
_KNOWN = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_MAX_REFERENCES = 16
_MAX_LENGTH = 1000  # of a text; llguidance repeats a state for each character


def tagged_grammar(tags: CallTags) -> StrictGrammar:
    """Return the grammars of a family."""

    def grammar(use: ToolUse, marker: MarkerOf, alone: bool, budget: Budget) -> str:
        return lark(*_Rules(tags, use, marker, budget).of_calls(alone))

    return grammar


class _Rules:
    def __init__(self, tags: CallTags, use: ToolUse, marker: MarkerOf, budget: Budget) -> None:
        self._budget = budget
        self._num_chars = 0  # of the rules
        self._tags = tags
        self._use = use
        self._added = marker
        self._line = "\n" if tags.line_around_values else ""
        self._key, self._value = self._marker(tags.key), self._marker(tags.value)
        self._key_end = self._marker(tags.key_end)
        self._value_end = self._marker(self._line + tags.value_end)
        self._rules: list[str] = []

    def _marker(self, text: str) -> Marker:
        """Return the marker for a tag, which may have an added token inside."""
        token = self._tags.token
        token_id = self._added(token).token_id if token and token in text else None
        if token_id is None:
            return self._added(text)
        before, _, behind = text.partition(token)
        return Marker(text, token_id, before, behind)

    def of_calls(self, alone: bool) -> Iterator[str]:
        tags, use = self._tags, self._use
        yield from start(use, self._marker(tags.begin), alone)
        if alone:
            yield TEXT
        more = "(BLANKS call)*" if tags.call_end and use.parallel else ""
        yield f"body: BLANKS call {more} BLANKS {self._marker(tags.end).term}"
        yield alternatives("call", len(use.tools))
        yield begin_rule("free_value", "TEXT", self._value_end)
        for index, tool in enumerate(use.tools):
            function = tool["function"]
            name = self._marker(tags.function + function["name"] + tags.function_end).term
            end = self._marker(tags.call_end).term if tags.call_end else ""
            arguments = self._arguments(function, index) if function.get("strict") else self._any_arguments()
            yield f"call_{index}: {name} BLANKS {arguments} {end}"
        yield from self._rules

    def _add(self, rule: str) -> None:
        """Raises RequestError once the rules are longer than a grammar may be."""
        self._rules.append(rule)
        self._num_chars += len(rule)
        check_chars(self._num_chars)

    def _any_arguments(self) -> str:
        return f"({self._opening(_NAME)} free_value BLANKS)*"

    def _opening(self, name: str) -> str:
        """The terms before a value; ``name`` is one, too."""
        value = f"BLANKS {self._value.term}" if self._tags.value else ""
        kind = f"/true|false/ {json.dumps(self._tags.kind_end)}" if self._tags.kind_end else ""
        line = json.dumps(self._line) if self._line else ""
        return f"{self._key.term} {name} {self._key_end.term} {kind} {value} {line}"

    def _arguments(self, function: dict[str, Any], index: int) -> str:
        """Raises RequestError for arguments that are not the properties of an object."""
        schema = json.loads(arguments_schema(function, self._budget))
        odd = next((name for name in schema if name not in _KNOWN), None)
        if odd is not None or schema.get("additionalProperties") not in (False, True, {}):
            odd = odd or "additionalProperties"
            raise RequestError(f"{shown(odd)} of a function's arguments cannot be held in this model's format of calls")
        terms = []
        listed = schema.get("required")
        required = frozenset(name for name in listed if isinstance(name, str)) if isinstance(listed, list) else ()
        for number, (name, part) in enumerate(schema.get("properties", {}).items()):
            rule = f"value_{index}_{number}"
            self._add(f"{rule}: {self._value_rule(part, schema, rule)}")
            term = f"{self._opening(json.dumps(name))} {rule} BLANKS"
            terms.append(term if name in required else f"({term})?")
        if schema.get("additionalProperties") is not False:
            terms.append(self._any_arguments())
        return " ".join(terms)

    def _value_rule(self, schema: Any, root: dict[str, Any], rule: str) -> str:
        """Return the alternatives for a value with its end."""
        forms: list[str] = []
        for number, part in enumerate(_alternatives(schema, root, 0, self._budget)):
            self._budget.spend_value(part)
            if "const" in part:
                value = part["const"]
                forms.append(
                    f"{json.dumps(value if isinstance(value, str) else json.dumps(value))} {self._value_end.term}"
                )
            elif part.get("type") == "string":
                if not (text := _text_regex(part)):
                    return "free_value"
                terminal = f"TEXT_{rule.upper()}_{number}"
                self._add(f"{terminal}: {text}")
                self._add(begin_rule(f"{rule}_{number}", terminal, self._value_end, text[1:-1]))
                forms.append(f"{rule}_{number}")
            else:
                document = {name: root[name] for name in ("$defs", "definitions") if name in root} | part
                self._budget.spend_value(document)
                self._add(f"{rule}_{number}: %json {json.dumps(document)}")
                # Not one text with the newline: that begins like white space of JSON, which would take it.
                forms.append(
                    f"{rule}_{number} {'BLANKS' if self._line else ''} {self._marker(self._tags.value_end).term}"
                )
        return " | ".join(forms)


def _alternatives(schema: Any, root: dict[str, Any], depth: int, budget: Budget) -> Iterator[dict[str, Any]]:
    """Yield schemas that together allow what a schema allows: strings, others and constants apart."""
    budget.spend()
    if schema is True or schema == {}:
        yield {"type": "string"}
        return
    if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
        raise RequestError("a value's schema cannot be held in this model's format of calls; simplify it")
    rest = {name: value for name, value in schema.items() if name not in ANNOTATIONS}
    if rest.keys() == {"$ref"}:
        yield from _alternatives(target_of(root, rest["$ref"], budget), root, depth + 1, budget)
    elif "const" in rest:
        yield {"const": rest["const"]}
    elif isinstance(rest.get("enum"), list):
        budget.spend(len(rest["enum"]))
        yield from ({"const": value} for value in rest["enum"])
    elif rest.keys() in ({"anyOf"}, {"oneOf"}):
        for each in rest.get("anyOf") or rest["oneOf"]:
            yield from _alternatives(each, root, depth + 1, budget)
    elif isinstance(kinds := rest.get("type"), list):
        budget.spend(len(kinds) * len(rest))
        yield from ({**rest, "type": kind} for kind in kinds)
    elif "type" in rest:
        yield rest
    else:
        raise RequestError("a value without type cannot be held in this model's format of calls; add the type")


def _text_regex(schema: dict[str, Any]) -> str:
    """Return a regex for a string; empty if all are allowed. Raises RequestError."""
    odd = next((name for name in schema if name not in ("type", "minLength", "maxLength", "format")), None)
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if odd is not None or max(least, most or 0) > _MAX_LENGTH:
        raise RequestError(
            f"{shown(odd or 'maxLength')} of a string cannot be held in this model's format of calls; leave it out"
        )
    return f"/(?s:.){{{least},{most}}}/" if least or most != "" else ""
