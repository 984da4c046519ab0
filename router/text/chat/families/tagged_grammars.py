"""Grammars of the calls that tagged_tool_parsers.py parses, for strict functions (strict_tools.py).

The arguments of a strict function come in the order of its schema. A string is text up to the tag that ends its value
and a tag that may follow, as the parser reads it; other values are JSON. Arguments of other functions are any texts by
any names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pdserve.errors import RequestError, shown
from router.text.chat.families.tagged_tool_parsers import CallTags
from router.text.chat.strict_tools import Frame, MarkerOf, StrictGrammar, alternatives, framed, lark
from router.text.chat.tool_grammar import Marker, arguments_schema
from router.text.chat.tools import ToolUse
from router.text.structured.closed_schemas import target_of
from router.text.structured.normalized_schemas import ANNOTATIONS
from router.text.structured.work_budget import Budget, check_chars

_ANY = "(?s:.*)"
_NAME = '/[^<>"\\s]{1,64}/'  # name of any argument
_KNOWN = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_MAX_REFERENCES = 16
_MAX_LENGTH = 1000  # characters of a string; llguidance repeats a state for each one


def tagged_grammar(tags: CallTags) -> StrictGrammar:
    """Return the grammars of a family."""

    def grammar(use: ToolUse, marker: MarkerOf, frame: Frame, budget: Budget) -> str:
        return lark(*_Rules(tags, use, marker, budget).of_calls(frame))

    return grammar


class _Rules:
    """The rules of calls. A value ends, as for the parser, with its end tag and a tag that may follow.

    So the rules are right-linear: the rule of a value with the tag behind it, then the rule of what that tag begins.

        function_I: NAME (key parameter_I_0 | call_end more)
        parameter_I_J: name_J (value_J_key parameter_I_(J+1) | value_J_end more | value_J_stop) | parameter_I_(J+1)
    """

    def __init__(self, tags: CallTags, use: ToolUse, marker: MarkerOf, budget: Budget) -> None:
        self._budget = budget
        self._num_chars = 0  # characters in all rules
        self._tags = tags
        self._use = use
        self._added = marker
        self._line = json.dumps("\n") if tags.line_around_values else ""
        self._key = self._marker(tags.key)
        self._value = self._marker(tags.value)
        self._key_end = self._marker(tags.key_end)
        self._value_end = self._marker(tags.value_end)
        self._end = self._marker(tags.end)
        self._closing = {"key": self._key, "end": self._marker(tags.call_end) if tags.call_end else self._end}
        if tags.call_end:
            self._closing["stop"] = self._end  # closes a call without its own end
        self._rules: dict[str, str] = {}  # rules by name

    def _marker(self, text: str) -> Marker:
        """Return the marker for a tag, which may have an added token inside."""
        token = self._tags.token
        token_id = self._added(token).token_id if token and token in text else None
        if token_id is None:
            return self._added(text)
        before, _, behind = text.partition(token)
        return Marker(text, token_id, before, behind)

    def of_calls(self, frame: Frame) -> Iterator[str]:
        tags = self._tags
        use = self._use
        function = self._marker(tags.function)
        bodies = {"body": self._marker(tags.begin)} | ({"function": function} if tags.function else {})
        yield from framed(use, bodies, frame)
        opening = function.term if tags.function else ""
        yield f"body: BLANKS {opening} function"
        yield alternatives("function", len(use.tools))
        another = f" | BLANKS {opening} function" if tags.call_end and use.parallel else ""
        yield f"more: BLANKS {self._end.term}{another}" if tags.call_end else 'more: ""'
        for index, tool in enumerate(use.tools):
            function_of = tool["function"]
            first = "any"
            may_end = True
            if function_of.get("strict"):
                first, may_end = self._parameters(function_of, index)
            else:
                self._add_any()
            forms = [f"{self._key.term} {first}"] if first else []
            forms += [f"{self._closing['end'].term} more"] if may_end else []
            name = self._marker(function_of["name"] + tags.function_end).term
            yield f"function_{index}: {name} BLANKS ({' | '.join(forms)})"
        yield from self._rules.values()

    def _add(self, name: str, rule: str) -> None:
        """Add a rule, or a terminal. Raises RequestError once the rules are longer than a grammar may be."""
        self._rules[name.partition("[")[0]] = f"{name}: {rule}"
        self._num_chars += len(rule)
        check_chars(self._num_chars)

    def _add_any(self) -> None:
        """Add the rule for arguments of any names."""
        if "any" not in self._rules:
            self._add("any", f"{self._head(_NAME)} ({self._followed('free', _ANY, rest='any', may_end=True)})")

    def _head(self, name: str) -> str:
        """The terms from a name up to its value; ``name`` is one, too."""
        value = f"BLANKS {self._value.term}" if self._tags.value else ""
        kind = f"/true|false/ {json.dumps(self._tags.kind_end)}" if self._tags.kind_end else ""
        return f"{name} {self._key_end.term} {kind} {value} {self._line}"

    def _parameters(self, function: dict[str, Any], index: int) -> tuple[str, bool]:
        """Return the rule of the first argument, "" if there is none, and whether all may be left out.

        Raises RequestError for arguments that are not the properties of an object.
        """
        schema = json.loads(arguments_schema(function, self._budget))
        odd = next((name for name in schema if name not in _KNOWN), None)
        if odd is not None or schema.get("additionalProperties") not in (False, True, {}):
            odd = odd or "additionalProperties"
            raise RequestError(f"{shown(odd)} of a function's arguments cannot be held in this model's format of calls")
        listed = schema.get("required")
        required = frozenset(name for name in listed if isinstance(name, str)) if isinstance(listed, list) else ()
        rest = ""
        may_end = True
        if schema.get("additionalProperties") is not False:
            self._add_any()
            rest = "any"
        for number, (name, part) in reversed([*enumerate(schema.get("properties", {}).items())]):
            rule = f"parameter_{index}_{number}"
            ends = self._ends_of(part, schema, f"value_{index}_{number}", rest=rest, may_end=may_end)
            skipped = f" | {rest}" if rest and name not in required else ""
            self._add(rule, f"{self._head(json.dumps(name))} ({ends}){skipped}")
            rest = rule
            may_end = may_end and name not in required
        return rest, may_end

    def _ends_of(self, schema: Any, root: dict[str, Any], rule: str, *, rest: str, may_end: bool) -> str:
        """Return the alternatives for a value and all that follows it: the rule ``rest``, or the end of the call."""
        followed: list[str] = []
        others: list[str] = []  # values other than texts
        for number, part in enumerate(_alternatives(schema, root, 0, self._budget)):
            self._budget.spend_value(part)
            if part.get("type") == "string" and "const" not in part:
                regex = _text_regex(part)
                form = "free" if regex == _ANY else f"{rule}_{number}"
                followed.append(self._followed(form, regex, rest=rest, may_end=may_end))
                continue
            if "const" in part:
                value = part["const"]
                text = json.dumps(value if isinstance(value, str) else json.dumps(value))
                others.append(f"{text} {self._line}")
            else:
                document = {name: root[name] for name in ("$defs", "definitions") if name in root} | part
                self._budget.spend_value(document)
                # Not the end tag with the newline: the JSON value would take the newline as white space.
                others.append(f"{rule}_{number} {'BLANKS' if self._line else ''}")
                self._add(f"{rule}_{number}", f"%json {json.dumps(document)}")
        if others:
            self._add(rule, " | ".join(others))
            followed.append(self._followed(rule, "", rest=rest, may_end=may_end))
        return " | ".join(followed)

    def _followed(self, form: str, regex: str, *, rest: str, may_end: bool) -> str:
        """Return the alternatives for a value by the tag that follows it, each with what that tag begins.

        The value is a text of ``regex``; without one, it is the rule ``form``.
        """
        behind = {"key": rest} if rest else {}
        if may_end:
            behind |= {name: "more" if name == "end" else "" for name in self._closing if name != "key"}
        stem = form if len(behind) == len(self._closing) else f"{form}_{'_'.join(behind)}"
        for closing in behind:
            if (name := f"{stem}_{closing}") in self._rules:
                continue
            if regex:
                others = [tag for other, tag in self._closing.items() if other not in behind]
                self._add_text(name, regex, self._closing[closing], others)
            else:
                self._add(name, f"{form} {self._value_end.term} BLANKS {self._closing[closing].term}")
        return " | ".join(f"{stem}_{closing} {then}" for closing, then in behind.items())

    def _add_text(self, name: str, regex: str, closing: Marker, others: Sequence[Marker]) -> None:
        """Add the rule for a text up to its end tag with the tag behind, and without its end tag before ``others``."""
        end = self._value_end
        terminal = f"{name.upper()}_TEXT"
        if end.token_id is not None:
            if end.before:  # part of the text for llguidance's lexer; so the first end tag ends the text
                text = f"{terminal} {end.term_after_text}"
                self._add(terminal, f"/{regex}{_escaped(end.before)}/")
            elif regex == _ANY:
                text = f"TEXT ({end.term} TEXT)* {end.term}"
            else:
                text = f"{terminal} {end.term}"
                self._add(terminal, f"/{regex}/")
            self._add(name, f"{text} BLANKS {closing.term}")
            return
        ended = f"{_escaped(end.text)}[ \\t\\r\\n]*"
        texts = [_escaped(tag.text) for tag in others if tag.token_id is None]
        without = f" & ~/{_ANY}{ended}({'|'.join(texts)}){_ANY}/" if texts else ""
        line = "\\n?" if self._line and regex != _ANY else ""
        if closing.token_id is None:
            self._add(f"{name}[lazy]", terminal)
            self._add(terminal, f"/{regex}{line}{ended}{_escaped(closing.text)}/{without}")
        else:
            self._add(name, f"{terminal} {closing.term_after_text}")
            self._add(terminal, f"/{regex}{line}{ended}{_escaped(closing.before)}/{without}")


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
        for branch in rest.get("anyOf") or rest["oneOf"]:
            yield from _alternatives(branch, root, depth + 1, budget)
    elif isinstance(kinds := rest.get("type"), list):
        budget.spend(len(kinds) * len(rest))
        yield from ({**rest, "type": kind} for kind in kinds)
    elif "type" in rest:
        yield rest
    else:
        raise RequestError("a value without type cannot be held in this model's format of calls; add the type")


def _text_regex(schema: dict[str, Any]) -> str:
    """Return a regex for a string. Raises RequestError."""
    odd = next((name for name in schema if name not in ("type", "minLength", "maxLength", "format")), None)
    least = schema.get("minLength", 0)
    most = schema.get("maxLength", "")
    if odd is not None or max(least, most or 0) > _MAX_LENGTH:
        raise RequestError(
            f"{shown(odd or 'maxLength')} of a string cannot be held in this model's format of calls; leave it out"
        )
    return f"(?s:.){{{least},{most}}}" if least or most != "" else _ANY


def _escaped(text: str) -> str:
    """Return a regex for a text, inside of slashes."""
    return re.escape(text).replace("/", r"\/")
