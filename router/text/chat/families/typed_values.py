"""Arguments that a model writes as plain texts between tags, as JSON.

The function's schema decides what a text is: text where only strings are allowed, JSON where it is valid JSON of an
allowed kind, else text.
"""

from __future__ import annotations

import json
from typing import Any

from router.text.structured.closed_schemas import target_of

_KINDS = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # Qwen3-Coder's template writes str(value)
_MAX_VISITS = 1000  # of schemas, for the kinds of one argument


class TypedValues:
    """The kinds of values that the arguments of a function have. ``schema`` is its JSON schema, unchecked."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema if isinstance(schema, dict) else {}
        self._known: dict[str, frozenset[str]] = {}
        self._visits = 0

    def is_text(self, name: str) -> bool:
        """Whether an argument can only be a string."""
        return self._kinds_of(name) == {"string"}

    def may_be_text(self, name: str) -> bool:
        """Whether an argument can be a string."""
        return "string" in self._kinds_of(name)

    def json_of(self, name: str, text: str) -> str:
        """Return the JSON of an argument from its whole text."""
        kinds = self._kinds_of(name)
        found = text.strip()
        found = _PYTHON.get(found, found)
        kind = _kind(found)
        if kind != "string" and (kind in kinds or (kind == "integer" and "number" in kinds)):
            return found  # a string in quotes is text: templates write strings without
        return quoted(text)

    def _kinds_of(self, name: str) -> frozenset[str]:
        if name not in self._known:
            properties = self._schema.get("properties")
            self._visits = 0
            self._known[name] = self._kinds(properties.get(name) if isinstance(properties, dict) else None)
        return self._known[name]

    def _kinds(self, schema: Any) -> frozenset[str]:
        """Return the kinds of values that a schema may allow."""
        self._visits += 1
        if not isinstance(schema, dict) or self._visits > _MAX_VISITS:
            return _KINDS
        found = _KINDS
        named = schema.get("type")
        if named is not None:
            found &= {each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)}
        if schema.get("nullable") is True:
            found |= {"null"}
        if isinstance(values := [schema["const"]] if "const" in schema else schema.get("enum"), list):
            found &= {_kind(json.dumps(value)) for value in values}
        if "$ref" in schema:
            found &= self._kinds(target_of(self._schema, schema["$ref"]))
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list) and schema[name]:
                found &= frozenset().union(*map(self._kinds, schema[name]))
        for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            found &= self._kinds(each)
        return found or _KINDS


def quoted(text: str) -> str:
    """Return a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Return a part of a JSON string."""
    return quoted(text)[1:-1]


def _kind(text: str) -> str:
    """Return the kind of a JSON value; empty for text that is no JSON."""
    try:
        value = json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return ""
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
        case _:
            return "null"


def _refused(constant: str) -> None:
    raise ValueError(constant)
