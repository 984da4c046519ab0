"""Rewrites JSON schemas of generators (pydantic, zod, OpenAPI, typed SDKs) to keywords that llguidance knows.

The rewritten schema allows what the schema allows, or a part of it where noted. Annotations and keywords without effect
are dropped. A keyword that cannot be rewritten stays, and llguidance refuses it (schema_problems.py names its place).

| keyword | becomes |
|---|---|
| any with null, except ``const`` and ``default`` | nothing: typed SDKs write null for fields that are not set |
| ``format`` with a name that llguidance does not know | nothing, as in JSON Schema, where it is an annotation |
| ``nullable`` (OpenAPI 3.0) | the union with null |
| ``not`` of everything (zod's never) | the schema ``false`` |
| ``propertyNames`` | properties, a pattern, or nothing where every name is allowed |
| ``uniqueItems`` of few known values | their arrangements, beyond four values in the order of the schema |
| ``oneOf`` with a tag | ``anyOf``; the tag is required, also where it has a default |
| ``unevaluatedProperties`` | ``additionalProperties``: objects are closed with all combined properties |
| ``pattern`` with look-ahead | several patterns (look_ahead.py) |
| bounds at the ends of ``float64`` | nothing |
| ``minProperties`` that required properties imply | nothing |
"""

from __future__ import annotations

import sys
from functools import lru_cache
from itertools import combinations, permutations
from typing import Any

import msgspec

from pdserve import grammar as grammars
from pdserve.errors import RequestError, shown
from router.text.structured.closed_schemas import CHILDREN, LISTS, MAPS_OF_CHILDREN, Schema, closed, target_of
from router.text.structured.look_ahead import has_look_ahead, without_look_ahead

_MAX_PERMUTED = 4  # values: 65 arrays
_MAX_COMBINED = 7  # values: 128 arrays
_MAX_LOOK_AHEADS = 16  # patterns of a schema, each of which takes up to 0.2 s the first time
_MAX_FORMAT = 32  # characters
_MAX_REFERENCES = 16  # that lead to one another
_MAX_VISITS = 10_000

_KEEP_NULL = ("const", "default")
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id", "id"}
)
_VALUES: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}  # by type
_NAME_KEYWORDS = frozenset({"type", "enum", "const", "pattern", "minLength", "maxLength", "format"})

_rewritten_pattern = lru_cache(256)(without_look_ahead)


def held_schema(schema: Schema) -> Schema:
    """Return a schema for llguidance, closed (closed_schemas.py).

    Raises RequestError if it is nested too deeply, or malformed.
    """
    try:
        normalized = _Normalizer(schema).schema(schema)
    except RecursionError:
        raise RequestError("the schema is nested too deeply; flatten it") from None
    return closed(normalized if isinstance(normalized, dict) else {"not": {}})


class _Normalizer:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._look_aheads: set[str] = set()
        self._visits = 0  # of branches with a tag

    def schema(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        result = {name: value for name, value in schema.items() if value is not None or name in _KEEP_NULL}
        nullable = result.pop("nullable", None) is True
        negated = result.get("not")
        if negated is False:
            del result["not"]
        elif negated is True or negated == {}:
            return False
        result = self._with_parts(result)
        _drop_unknown_format(result)
        _drop_bounds_of_float64(result)
        self._rewrite_property_names(result)
        self._rewrite_tags(result)
        _rewrite_unevaluated(result)
        _drop_implied_counts(result)
        self._rewrite_pattern(result)
        result = self._with_arrangements(result)
        return _or_null(result) if nullable else result

    def _with_parts(self, schema: Schema) -> Schema:
        result = dict(schema)
        for name in MAPS_OF_CHILDREN:
            if name in schema:
                result[name] = {key: self.schema(part) for key, part in _checked(schema, name, dict).items()}
        for name in LISTS:
            if name in schema:
                result[name] = [self.schema(each) for each in _checked(schema, name, list)]
        for name in CHILDREN:
            part = schema.get(name)
            if isinstance(part, list):
                result[name] = [self.schema(each) for each in part]
            elif isinstance(part, dict):
                result[name] = self.schema(part)
        return result

    def _resolved(self, schema: Any) -> Any:
        """Follow references; None where they lead nowhere."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = target_of(self._root, schema["$ref"])
        return None

    def _values(self, schema: Any) -> list[Any] | None:
        """Return all values that a schema allows, if it lists them."""
        schema = self._resolved(schema)
        if not isinstance(schema, dict):
            return None
        if "const" in schema:
            return [schema["const"]]
        if isinstance(schema.get("enum"), list):
            return _distinct(schema["enum"])
        return _VALUES.get(str(schema.get("type")))

    # ---------------------------------------------------------------- objects

    def _rewrite_property_names(self, schema: Schema) -> None:
        names = self._resolved(schema.get("propertyNames"))
        if names is True:
            names = {}
        if not isinstance(names, dict) or not names.keys() <= _NAME_KEYWORDS | ANNOTATIONS:
            return
        others = schema.get("additionalProperties", True)
        properties = schema.get("properties", {})
        if names.get("type", "string") != "string" or not isinstance(properties, dict):
            return
        pattern = _pattern_of_names(names)
        if (values := self._values(names)) is not None:
            if "patternProperties" in schema:
                return
            schema["properties"] = {name: properties.get(name, others) for name in values if isinstance(name, str)}
            schema["additionalProperties"] = False
        elif pattern is not None:
            if properties or "patternProperties" in schema or has_look_ahead(pattern):
                return
            schema["patternProperties"] = {pattern: others}
            schema["additionalProperties"] = False
        del schema["propertyNames"]

    # ---------------------------------------------------------------- unions with a tag

    def _rewrite_tags(self, schema: Schema) -> None:
        branches = schema.get("oneOf")
        if not isinstance(branches, list) or "anyOf" in schema:
            return
        tag = self._tag(branches) if len(branches) > 1 else ""
        if tag is not None:
            schema["anyOf"] = [_requiring(branch, tag) if tag else branch for branch in branches]
            del schema["oneOf"]

    def _tag(self, branches: list[Any]) -> str | None:
        """Return a property whose possible values differ in all branches."""
        first = self._resolved(branches[0])
        for _ in range(_MAX_REFERENCES):
            first = self._resolved(next(iter(_branches(first)), first))
        names = first.get("properties") if isinstance(first, dict) else None
        for name in names if isinstance(names, dict) else ():
            sets = [self._tags(branch, name, 0) for branch in branches]
            found = [value for values in sets if values is not None for value in values]
            if None not in sets and len(set(found)) == len(found):
                return str(name)
        return None

    def _tags(self, branch: Any, name: str, depth: int) -> set[bytes] | None:
        """Return the values, as JSON, that a property has in a branch or in the branches inside it."""
        branch = self._resolved(branch)
        self._visits += 1
        if not isinstance(branch, dict) or depth > _MAX_REFERENCES or self._visits > _MAX_VISITS:
            return None
        properties = branch.get("properties")
        if isinstance(properties, dict) and name in properties:
            values = self._values(properties[name])
            return None if values is None else set(map(msgspec.json.encode, values))
        found = set[bytes]()
        for each in _branches(branch) or [None]:
            if (inner := self._tags(each, name, depth + 1)) is None:
                return None
            found |= inner
        return found

    # ---------------------------------------------------------------- arrays and texts

    def _with_arrangements(self, schema: Schema) -> Schema:
        """Rewrite ``uniqueItems``."""
        if "uniqueItems" not in schema:
            return schema
        rest = {name: value for name, value in schema.items() if name != "uniqueItems"}
        kinds = schema.get("type", "array")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        least, most = schema.get("minItems", 0), schema.get("maxItems", _MAX_COMBINED)
        if schema["uniqueItems"] is False or "array" not in kinds or most in (0, 1):
            return rest
        values = None if "prefixItems" in schema else self._values(schema.get("items"))
        if values is None or not isinstance(least, int) or not isinstance(most, int) or len(values) > _MAX_COMBINED:
            return schema
        arrange = permutations if len(values) <= _MAX_PERMUTED else combinations
        arrays = [list(each) for count in range(least, min(most, len(values)) + 1) for each in arrange(values, count)]
        if not arrays:
            return schema
        kinds = [kind for kind in kinds if kind != "array"]
        defs: Schema = {name: rest[name] for name in ("$defs", "definitions") if name in rest}
        return {"anyOf": [{"enum": arrays}, {**rest, "type": kinds}], **defs} if kinds else {"enum": arrays, **defs}

    def _rewrite_pattern(self, schema: Schema) -> None:
        pattern = schema.get("pattern")
        if not isinstance(pattern, str) or not has_look_ahead(pattern):
            return
        self._look_aheads.add(pattern)
        patterns = _rewritten_pattern(pattern) if len(self._look_aheads) <= _MAX_LOOK_AHEADS else None
        if patterns is not None:
            schema["pattern"] = patterns[0]
            if len(patterns) > 1:
                schema["allOf"] = [*schema.get("allOf", []), *({"pattern": each} for each in patterns[1:])]


def _checked(schema: Schema, name: str, kind: type) -> Any:
    if not isinstance(schema[name], kind):
        article = "an object" if kind is dict else "a list"
        raise RequestError(f"{name} of a schema must be {article}, not {shown(schema[name])}")
    return schema[name]


def _drop_unknown_format(schema: Schema) -> None:
    name = schema.get("format")
    if not isinstance(name, str) or len(name) > _MAX_FORMAT or not grammars.knows_format(name):
        schema.pop("format", None)


def _drop_bounds_of_float64(schema: Schema) -> None:
    """Drop bounds that every number holds, such as zod's of ``float64``; llguidance knows no regex for them."""
    for name, sign in (("minimum", -1), ("maximum", 1)):
        if schema.get(name) == sign * sys.float_info.max:
            del schema[name]


def _pattern_of_names(names: Schema) -> str | None:
    """Return a pattern for names of properties; None if all are allowed, or listed."""
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if isinstance(pattern := names.get("pattern"), str):
        return pattern
    return f"^(?s:.){{{least},{most}}}$" if least or most != "" else None


def _branches(schema: Any) -> list[Any]:
    found = schema.get("oneOf") or schema.get("anyOf") if isinstance(schema, dict) else None
    return found if isinstance(found, list) else []


def _requiring(branch: Any, name: str) -> Any:
    required = branch.get("required", []) if isinstance(branch, dict) else None
    if not isinstance(required, list) or name in required:
        return branch
    return {**branch, "required": [*required, name]}


def _rewrite_unevaluated(schema: Schema) -> None:
    """Drop ``unevaluatedProperties: false``: closing has its effect."""
    others = schema.get("unevaluatedProperties")
    if not isinstance(others, bool) or "additionalProperties" in schema:
        return
    del schema["unevaluatedProperties"]
    if others or not schema.keys() & {*LISTS, "$ref", "properties", "patternProperties"}:
        schema["additionalProperties"] = others


def _drop_implied_counts(schema: Schema) -> None:
    """Drop counts of properties that hold anyway; llguidance knows them only where all properties are required."""
    required, properties = schema.get("required"), schema.get("properties")
    least, most = schema.get("minProperties"), schema.get("maxProperties")
    if isinstance(required, list) and isinstance(least, int) and len(set(map(str, required))) >= least:
        del schema["minProperties"]
    is_closed = not schema.keys() & {*LISTS, "$ref", "patternProperties"} and not schema.get("additionalProperties")
    if isinstance(properties, dict) and isinstance(most, int) and is_closed and len(properties) <= most:
        del schema["maxProperties"]


def _or_null(schema: Schema) -> Schema:
    defs: Schema = {name: schema.pop(name) for name in ("$defs", "definitions") if name in schema}
    return {"anyOf": [schema, {"type": "null"}], **defs}


def _distinct(values: list[Any]) -> list[Any]:
    return list({msgspec.json.encode(value): value for value in values}.values())
