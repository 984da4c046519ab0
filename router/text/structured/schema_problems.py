"""Names the place in a JSON schema, and the keyword there, that keeps it from being held."""

from __future__ import annotations

from collections.abc import Iterator
from time import thread_time
from typing import Any

import msgspec

from pdserve.grammar import json_schema_problem
from router.text.structured.closed_schemas import CHILDREN, LISTS, MAPS_OF_CHILDREN

_MAX_SECONDS = 1.0  # CPU time; when it is over, the place may be a larger part
_DEFINITIONS = ("$defs", "definitions")


def located_problem(grammar: str) -> str:
    """Return the place and the problem of a grammar that is a JSON schema only; empty for others, and without problem.

    The place is the smallest part that alone has the problem, and the first keyword there without which it has not:
    ``$defs.Tags.uniqueItems``.
    """
    try:
        schema = _SERIALIZED.decode(grammar).grammars[0].json_schema
    except (msgspec.DecodeError, RecursionError, IndexError):
        return ""
    problem = json_schema_problem(schema)
    return f"the schema cannot be held at {'.'.join(_place(schema, problem))}: {problem}" if problem else ""


class _Part(msgspec.Struct, frozen=True):
    json_schema: dict[str, Any]


class _Serialized(msgspec.Struct, frozen=True):
    grammars: tuple[_Part]


_SERIALIZED = msgspec.json.Decoder(_Serialized)


def _place(schema: dict[str, Any], problem: str) -> list[str]:
    until = thread_time() + _MAX_SECONDS
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}

    def has_problem(part: Any) -> bool:
        if not isinstance(part, dict) or thread_time() > until:
            return False
        return json_schema_problem({**definitions, **part}) == problem

    place: list[str] = []
    part = schema
    while faulty := next(((key, child) for key, child in _parts(part) if has_problem(child)), None):
        key, part = faulty
        place.append(key)
    for name in part:
        if name not in definitions and not has_problem({key: value for key, value in part.items() if key != name}):
            return [*place, name]
    return place or ["its root"]


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas inside a schema, with their places. Definitions come first: others refer to them."""
    for name in sorted(MAPS_OF_CHILDREN, key=lambda name: name not in _DEFINITIONS):
        children = schema.get(name)
        for key, part in children.items() if isinstance(children, dict) else ():
            yield f"{name}.{key}", part
    for name in (*CHILDREN, *LISTS):
        part = schema.get(name)
        if isinstance(part, list):
            yield from ((f"{name}.{index}", branch) for index, branch in enumerate(part))
        elif part is not None:
            yield name, part
