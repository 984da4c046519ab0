"""Closes JSON schemas: objects that declare properties have no others, unless the schema says something about others.

{"properties": {"a": …}}                               gets additionalProperties: false
{"type": "object"}                                     declares nothing and stays free
{"properties": {"a": …}, "anyOf": [{"properties": {"b": …}}, …]}
                                                       each branch is closed with a and its own properties
{"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": …}}]}
                                                       is closed with b and the properties of A, which is left open
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from pdserve.errors import RequestError
from router.text.structured.finite_patterns import matched_names
from router.text.structured.work_budget import Budget

LISTS = ("allOf", "anyOf", "oneOf")  # keywords with a list of schemas for the same value
_OTHERS = ("additionalProperties", "unevaluatedProperties")
MAPS_OF_CHILDREN = ("properties", "patternProperties", "$defs", "definitions")
CHILDREN = (
    "items",
    "prefixItems",
    "additionalItems",
    "contains",
    *_OTHERS,
)  # keywords with schemas for parts of the value, or lists of them
_VISIT_WORK = 8  # steps for a schema, beside those for its keys

Schema = dict[str, Any]


class _Declared(msgspec.Struct):
    """Properties that a schema and its combined schemas declare. ``decided``: one of them rules on other properties."""

    any: bool = False
    names: dict[str, bool] = {}  # name → true, in order
    patterns: dict[str, bool] = {}
    decided: bool = False

    def add(self, other: _Declared, budget: Budget) -> None:
        budget.spend(1 + len(other.names) + len(other.patterns))
        self.any |= other.any
        self.names |= other.names
        self.patterns |= other.patterns
        self.decided |= other.decided


def closed(schema: Schema, budget: Budget) -> Schema:
    """Return the closed schema. Raises RequestError for one that is nested too deeply, or WorkExceeded."""
    try:
        return _Closer(schema, budget).document()
    except RecursionError:
        raise RequestError("the schema is nested too deeply; flatten it") from None


class _Closer:
    def __init__(self, root: Schema, budget: Budget) -> None:
        self._root = root
        self._budget = budget
        self._opened: dict[str, str] = {}  # names of open copies in $defs, by reference
        self._copies: Schema = {}

    def document(self) -> Schema:
        result = self._schema(self._root, _Declared(), True)
        return {**result, "$defs": {**result.get("$defs", {}), **self._copies}} if self._copies else result

    def _schema(self, schema: Any, inherited: _Declared, close: bool) -> Any:
        """Rewrite a schema; ``inherited``: declared by schemas beside it. Without ``close`` only its parts change."""
        self._budget.spend()
        if not isinstance(schema, dict):
            return schema
        result = self._with_closed_children(schema)
        own = _own(schema, self._budget)
        lists = {name: schema[name] for name in LISTS if isinstance(schema.get(name), list)}
        alternatives = {n: v for n, v in lists.items() if n != "allOf" or (len(v) == 1 and not own.any)}
        combined = [branch for name in lists.keys() - alternatives.keys() for branch in lists[name]]
        declared = self._joined((inherited, own, *(self._declared(branch, ()) for branch in combined)))
        if "$ref" in schema:
            target = self._declared({"$ref": schema["$ref"]}, ())
            if ((declared.any or alternatives) and target.any) or not close:
                result["$ref"] = self._open_reference(schema["$ref"])
            if declared.any or alternatives:
                declared.add(target, self._budget)
        for name, branches in lists.items():
            if name in alternatives:
                others = (self._declared(o, ()) for n in alternatives if n != name for o in lists[n])
                beside = self._joined((declared, *others))
                result[name] = [self._schema(branch, beside, close) for branch in branches]
            else:
                result[name] = [self._schema(branch, _Declared(), close and not declared.any) for branch in branches]
        if close and not alternatives and declared.any and not declared.decided and _may_be_object(schema):
            self._budget.spend(len(declared.names) + len(declared.patterns))
            result["properties"] = {**declared.names, **result.get("properties", {})}
            if declared.patterns:
                result["patternProperties"] = {**declared.patterns, **result.get("patternProperties", {})}
            result["additionalProperties"] = False
        return _with_names_for_patterns(result, self._budget)

    def _joined(self, parts: Iterable[_Declared]) -> _Declared:
        joined = _Declared()
        for part in parts:
            joined.add(part, self._budget)
        return joined

    def _with_closed_children(self, schema: Schema) -> Schema:
        self._budget.spend(_VISIT_WORK + len(schema))
        result = dict(schema)
        for name in MAPS_OF_CHILDREN:
            if isinstance(schema.get(name), dict):
                result[name] = {key: self._schema(part, _Declared(), True) for key, part in schema[name].items()}
        for name in CHILDREN:
            part = schema.get(name)
            if isinstance(part, list):
                result[name] = [self._schema(child, _Declared(), True) for child in part]
            elif isinstance(part, dict):
                result[name] = self._schema(part, _Declared(), True)
        return result

    def _declared(self, schema: Any, seen: tuple[str, ...]) -> _Declared:
        """Return what a schema declares, with all that it combines. ``seen``: references that led to it."""
        self._budget.spend()
        if not isinstance(schema, dict):
            return _Declared()
        self._budget.spend(2)
        declared = _own(schema, self._budget)
        for name in LISTS:
            for branch in schema[name] if isinstance(schema.get(name), list) else ():
                declared.add(self._declared(branch, seen), self._budget)
        reference = schema.get("$ref")
        self._budget.spend(len(seen))
        if reference is not None and reference not in seen:
            target = target_of(self._root, reference, self._budget)
            named = _Declared(decided=True) if target is None else self._declared(target, (*seen, reference))
            declared.add(named, self._budget)
        return declared

    def _open_reference(self, reference: Any) -> Any:
        """Return a reference to an open copy of what ``reference`` names."""
        target = target_of(self._root, reference, self._budget)
        if not isinstance(target, dict):
            return reference
        if reference not in self._opened:
            self._opened[reference] = name = f"open-{len(self._opened)}"
            content = {key: value for key, value in target.items() if key not in ("$defs", "definitions", "$id")}
            self._copies[name] = self._schema(content, _Declared(), False)
        return f"#/$defs/{self._opened[reference]}"


def target_of(root: Any, reference: Any, budget: Budget) -> Any:
    """Return the schema that a reference inside the document ``root`` names; None for other references."""
    budget.spend()
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    budget.spend(len(reference) // 4)  # a key has two characters or more
    target: Any = root
    for key in reference[1:].split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
            target = target[int(key)]
        elif isinstance(target, dict) and key in target:
            target = target[key]
        else:
            return None
    return target if reference == "#" or reference.startswith("#/") else None


def _own(schema: Schema, budget: Budget) -> _Declared:
    """Return what a schema declares itself. A required property is declared, too."""
    maps = [schema[name] if isinstance(schema.get(name), dict) else {} for name in ("properties", "patternProperties")]
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    budget.spend(sum(map(len, maps)) + len(required))
    names = [*maps[0], *(name for name in required if isinstance(name, str))]
    return _Declared(
        any="properties" in schema or "patternProperties" in schema,
        names=dict.fromkeys(names, True),
        patterns=dict.fromkeys(maps[1], True),
        decided=any(name in schema for name in _OTHERS),
    )


def _with_names_for_patterns(schema: Schema, budget: Budget) -> Schema:
    """Apply patterns to the properties that they match, in place of ``patternProperties``, if they match no others."""
    patterns = schema.get("patternProperties")
    properties = schema.get("properties", {})
    if schema.get("additionalProperties") is not False or not isinstance(properties, dict):
        return schema
    if not patterns or not isinstance(patterns, dict):
        return schema
    budget.spend(len(schema) + len(properties))
    result = {**schema, "properties": dict(properties)}
    del result["patternProperties"]
    for pattern, part in patterns.items():
        names = matched_names(pattern, properties.keys(), budget)
        if names is None:
            return schema
        for name in names if part not in (True, {}) else ():
            own = result["properties"][name]
            result["properties"][name] = part if own in (True, {}) else {"allOf": [own, part]}
    return result


def _may_be_object(schema: Schema) -> bool:
    kind = schema.get("type", "object")
    return "object" in kind if isinstance(kind, str | list) else True
