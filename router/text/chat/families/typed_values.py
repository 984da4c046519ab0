"""Arguments that a model writes as plain texts between tags, as JSON.

The function's schema decides what a text is: text where only strings are allowed, JSON where it is valid JSON of an
allowed kind, else text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from router.text.structured.closed_schemas import target_of
from router.text.structured.work_budget import Budget

_KINDS = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # Qwen3-Coder's template writes str(value)
_MAX_PYTHON = 4096  # characters of a value in Python's notation, read in 16 ms; a longer one is text
_NAME = re.compile(r"[\w.-]{1,64}")
_MAX_WORK = 20_000  # steps for the kinds of a function's arguments, about 5 ms; beyond, an argument has any kind


class TypedValues:
    """The kinds of values that the arguments of a function have. ``schema`` is its JSON schema, unchecked.

    ``held``: a grammar holds calls to their format.
    """

    def __init__(self, schema: Any, held: bool = False) -> None:
        self.held = held
        self._schema = schema if isinstance(schema, dict) else {}
        self._known: dict[str, frozenset[str]] = {}
        self._budget = Budget(_MAX_WORK)

    def is_text(self, name: str) -> bool:
        """Whether an argument can only be a string."""
        return self._kinds_of(name) == {"string"}

    def may_be_text(self, name: str) -> bool:
        """Whether an argument can be a string."""
        return "string" in self._kinds_of(name)

    def may_have(self, name: str) -> bool:
        """Whether the schema has an argument of this name, or names none."""
        properties = self._schema.get("properties")
        return name in properties if isinstance(properties, dict) and properties else _NAME.fullmatch(name) is not None

    def json_of(self, name: str, text: str) -> str:
        """Return the JSON of an argument from its whole text."""
        kinds = self._kinds_of(name)
        value = text.strip()
        value = _PYTHON.get(value, value)
        kind = _kind(value)
        if not kind and kinds & {"array", "object"}:
            value = _json_of_python(value)
            kind = _kind(value)
        if kind != "string" and (kind in kinds or (kind == "integer" and "number" in kinds)):
            return value  # a string in quotes is text: templates write strings without
        return quoted(text)

    def _kinds_of(self, name: str) -> frozenset[str]:
        if name not in self._known:
            properties = self._schema.get("properties")
            schema = properties.get(name) if isinstance(properties, dict) else None
            try:
                kinds = self._budget.attempt(lambda budget: _kinds(schema, self._schema, budget))
            except RecursionError:
                kinds = None
            self._known[name] = kinds or _KINDS
        return self._known[name]


def _kinds(schema: Any, root: dict[str, Any], budget: Budget) -> frozenset[str]:
    """Return the kinds of values that a schema may allow."""
    budget.spend(3)
    if not isinstance(schema, dict):
        return _KINDS
    kinds = _KINDS
    named = schema.get("type")
    if named is not None:
        names = named if isinstance(named, list) else [named]
        budget.spend(len(names))
        kinds &= {kind for kind in names if isinstance(kind, str)}
    if schema.get("nullable") is True:
        kinds |= {"null"}
    if isinstance(values := [schema["const"]] if "const" in schema else schema.get("enum"), list):
        budget.spend(len(values))
        kinds &= set(map(_kind_of, values))
    if "$ref" in schema:
        kinds &= _kinds(target_of(root, schema["$ref"], budget), root, budget)
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list) and schema[name]:
            kinds &= frozenset().union(*(_kinds(branch, root, budget) for branch in schema[name]))
    for branch in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        kinds &= _kinds(branch, root, budget)
    return kinds or _KINDS


def typed_values(schemas: Mapping[str, Any], held: bool = False) -> dict[str, TypedValues]:
    """Return the kinds of arguments by function. All outputs of a request share them, and their work."""
    return {name: TypedValues(schema, held) for name, schema in schemas.items()}


def quoted(text: str) -> str:
    """Return a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Return a part of a JSON string."""
    return quoted(text)[1:-1]


def _json_of_python(text: str) -> str:
    """Return the JSON of a list or dictionary in Python's notation; empty for other texts."""
    if not text.startswith(("[", "{")) or len(text) > _MAX_PYTHON:
        return ""
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ""


def _kind(text: str) -> str:
    """Return the kind of a JSON value; empty for text that is no JSON."""
    try:
        return _kind_of(json.loads(text, parse_constant=_refused))
    except (ValueError, RecursionError):
        return ""


def _kind_of(value: Any) -> str:
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
