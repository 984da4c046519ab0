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
from itertools import combinations, permutations
from typing import Any

from pdserve import grammar as grammars
from pdserve.errors import RequestError, shown
from router.text.structured.closed_schemas import CHILDREN, LISTS, MAPS_OF_CHILDREN, Schema, closed, target_of
from router.text.structured.look_ahead import RewrittenPatterns, has_look_ahead
from router.text.structured.work_budget import Budget

_MAX_PERMUTED = 4  # values: 65 arrays
_MAX_COMBINED = 7  # values: 128 arrays
_MAX_LOOK_AHEADS = 16  # patterns of a schema
_MAX_FORMAT = 32  # characters
_MAX_REFERENCES = 16  # references that lead to one another
_MAX_TAG_WORK = 100_000  # steps for a schema; above, its unions have no tag
_VISIT_WORK = 8  # steps for a schema, beside those for its keys
_FORMAT_WORK = 300  # steps for a name, which llguidance compiles

_KEEP_NULL = ("const", "default")
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id", "id"}
)
_VALUES: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}  # by type
_NAME_KEYWORDS = frozenset({"type", "enum", "const", "pattern", "minLength", "maxLength", "format"})

_patterns = RewrittenPatterns()


def held_schema(schema: Schema, budget: Budget) -> Schema:
    """Return a schema for llguidance, closed (closed_schemas.py).

    Raises RequestError if it is nested too deeply, or malformed, or WorkExceeded.
    """
    try:
        normalized = _Normalizer(schema, budget).schema(schema)
    except RecursionError:
        raise RequestError("the schema is nested too deeply; flatten it") from None
    return closed(normalized if isinstance(normalized, dict) else {"not": {}}, budget)


class _Normalizer:
    def __init__(self, root: Schema, budget: Budget) -> None:
        self._root = root
        self._budget = budget
        self._tag_budget = budget.part(_MAX_TAG_WORK)
        self._known_values: dict[int, tuple[Any, set[bytes] | None]] = {}  # schemas and their values, by id
        self._look_aheads: set[str] = set()
        self._formats: set[str] = set()

    def schema(self, schema: Any) -> Any:
        self._budget.spend()
        if not isinstance(schema, dict):
            return schema
        self._budget.spend(_VISIT_WORK + len(schema))
        result = {name: value for name, value in schema.items() if value is not None or name in _KEEP_NULL}
        nullable = result.pop("nullable", None) is True
        negated = result.get("not")
        if negated is False:
            del result["not"]
        elif negated is True or negated == {}:
            return False
        result = self._with_parts(result)
        self._drop_unknown_format(result)
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
                result[name] = [self.schema(branch) for branch in _checked(schema, name, list)]
        for name in CHILDREN:
            part = schema.get(name)
            if isinstance(part, list):
                result[name] = [self.schema(child) for child in part]
            elif isinstance(part, dict):
                result[name] = self.schema(part)
        return result

    def _drop_unknown_format(self, schema: Schema) -> None:
        name = schema.get("format")
        if isinstance(name, str) and len(name) <= _MAX_FORMAT:
            self._budget.spend(_FORMAT_WORK if name not in self._formats else 1)
            self._formats.add(name)
            if grammars.knows_format(name):
                return
        schema.pop("format", None)

    def _resolved(self, schema: Any, budget: Budget) -> Any:
        """Follow references; None where they lead nowhere."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = target_of(self._root, schema["$ref"], budget)
        return None

    def _values(self, schema: Any, budget: Budget) -> list[Any] | None:
        """Return all values that a schema allows, if it lists them."""
        schema = self._resolved(schema, budget)
        if not isinstance(schema, dict):
            return None
        if "const" in schema:
            return [schema["const"]]
        if isinstance(schema.get("enum"), list):
            return list({budget.encoded(value): value for value in schema["enum"]}.values())
        return _VALUES.get(str(schema.get("type")))

    # ---------------------------------------------------------------- objects

    def _rewrite_property_names(self, schema: Schema) -> None:
        names = self._resolved(schema.get("propertyNames"), self._budget)
        if names is True:
            names = {}
        if not isinstance(names, dict) or not names.keys() <= _NAME_KEYWORDS | ANNOTATIONS:
            return
        others = schema.get("additionalProperties", True)
        properties = schema.get("properties", {})
        if names.get("type", "string") != "string" or not isinstance(properties, dict):
            return
        pattern = _pattern_of_names(names)
        if (values := self._values(names, self._budget)) is not None:
            if "patternProperties" in schema:
                return
            self._budget.spend(len(values))
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
        tag = self._tag_budget.attempt(lambda part: self._tag(branches, part)) if len(branches) > 1 else ""
        if tag is not None:
            schema["anyOf"] = [_requiring(branch, tag) if tag else branch for branch in branches]
            del schema["oneOf"]

    def _tag(self, branches: list[Any], budget: Budget) -> str | None:
        """Return a property whose possible values differ in all branches."""
        first = self._resolved(branches[0], budget)
        for _ in range(_MAX_REFERENCES):
            first = self._resolved(next(iter(_branches(first)), first), budget)
        names = first.get("properties") if isinstance(first, dict) else None
        names = names if isinstance(names, dict) else {}
        return next((name for name in names if self._is_tag(name, branches, budget)), None)

    def _is_tag(self, name: str, branches: list[Any], budget: Budget) -> bool:
        tags = set[bytes]()
        for branch in branches:
            values = self._tags(branch, name, 0, budget)
            if values is None or not tags.isdisjoint(values):
                return False
            tags |= values
        return True

    def _tags(self, branch: Any, name: str, depth: int, budget: Budget) -> set[bytes] | None:
        """Return the values, as JSON, that a property has in a branch or in the branches inside it."""
        budget.spend()
        branch = self._resolved(branch, budget)
        if not isinstance(branch, dict) or depth > _MAX_REFERENCES:
            return None
        properties = branch.get("properties")
        if isinstance(properties, dict) and name in properties:
            return self._encoded_values(properties[name], budget)
        tags = set[bytes]()
        for inner_branch in _branches(branch) or [None]:
            if (inner := self._tags(inner_branch, name, depth + 1, budget)) is None:
                return None
            budget.spend(len(inner))
            tags |= inner
        return tags

    def _encoded_values(self, schema: Any, budget: Budget) -> set[bytes] | None:
        """Return the values of a schema as JSON. Branches often share it."""
        schema = self._resolved(schema, budget)
        if id(schema) not in self._known_values:
            values = self._values(schema, budget)
            encoded = None if values is None else set(map(budget.encoded, values))
            self._known_values[id(schema)] = schema, encoded  # keeping the schema keeps its id valid
        return self._known_values[id(schema)][1]

    # ---------------------------------------------------------------- arrays and texts

    def _with_arrangements(self, schema: Schema) -> Schema:
        """Rewrite ``uniqueItems``."""
        if "uniqueItems" not in schema:
            return schema
        rest = {name: value for name, value in schema.items() if name != "uniqueItems"}
        kinds = schema.get("type", "array")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        least = schema.get("minItems", 0)
        most = schema.get("maxItems", _MAX_COMBINED)
        if schema["uniqueItems"] is False or "array" not in kinds or most in (0, 1):
            return rest
        values = None if "prefixItems" in schema else self._values(schema.get("items"), self._budget)
        if values is None or not isinstance(least, int) or not isinstance(most, int) or len(values) > _MAX_COMBINED:
            return schema
        arrange = permutations if len(values) <= _MAX_PERMUTED else combinations
        self._budget.spend(128 * len(values))  # at most
        arrays = [
            list(arranged) for count in range(least, min(most, len(values)) + 1) for arranged in arrange(values, count)
        ]
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
        patterns = _patterns.get(pattern, self._budget) if len(self._look_aheads) <= _MAX_LOOK_AHEADS else None
        if patterns is not None:
            schema["pattern"] = patterns[0]
            if len(patterns) > 1:
                schema["allOf"] = [*schema.get("allOf", []), *({"pattern": pattern} for pattern in patterns[1:])]


def _checked(schema: Schema, name: str, kind: type) -> Any:
    if not isinstance(schema[name], kind):
        article = "an object" if kind is dict else "a list"
        raise RequestError(f"{name} of a schema must be {article}, not {shown(schema[name])}")
    return schema[name]


def _drop_bounds_of_float64(schema: Schema) -> None:
    """Drop bounds that every number holds, such as zod's of ``float64``; llguidance knows no regex for them."""
    for name, sign in (("minimum", -1), ("maximum", 1)):
        if schema.get(name) == sign * sys.float_info.max:
            del schema[name]


def _pattern_of_names(names: Schema) -> str | None:
    """Return a pattern for names of properties; None if all are allowed, or listed."""
    least = names.get("minLength", 0)
    most = names.get("maxLength", "")
    if isinstance(pattern := names.get("pattern"), str):
        return pattern
    return f"^(?s:.){{{least},{most}}}$" if least or most != "" else None


def _branches(schema: Any) -> list[Any]:
    branches = schema.get("oneOf") or schema.get("anyOf") if isinstance(schema, dict) else None
    return branches if isinstance(branches, list) else []


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
    required = schema.get("required")
    properties = schema.get("properties")
    least = schema.get("minProperties")
    most = schema.get("maxProperties")
    if isinstance(required, list) and isinstance(least, int) and len(set(map(str, required))) >= least:
        del schema["minProperties"]
    is_closed = not schema.keys() & {*LISTS, "$ref", "patternProperties"} and not schema.get("additionalProperties")
    if isinstance(properties, dict) and isinstance(most, int) and is_closed and len(properties) <= most:
        del schema["maxProperties"]


def _or_null(schema: Schema) -> Schema:
    defs: Schema = {name: schema.pop(name) for name in ("$defs", "definitions") if name in schema}
    return {"anyOf": [schema, {"type": "null"}], **defs}
