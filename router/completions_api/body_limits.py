"""Limits of a request body beyond its size in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pdserve.errors import RequestError

MAX_NESTING = 100  # levels of objects and lists
MAX_ITEMS = 200_000  # values in all objects and lists, token ids excluded
MAX_LENGTHS = {  # by field
    "messages": 10_000,
    "tools": 1024,
    "documents": 1024,
    "chat_template_kwargs": 64,
    "logit_bias": 1024,
    "stop_token_ids": 1024,
    "cache_salt": 1024,
}
_TOKEN_IDS = ("prompt", "tokens")  # lists of token ids; their types bound the nesting
MAX_STOP_CHARS = 4096  # per stop string


def check_shape(fields: Mapping[str, Any]) -> None:
    """Check nesting and number of values. Raises RequestError."""
    num_items = 0
    level = _containers(value for name, value in fields.items() if name not in _TOKEN_IDS)
    for _ in range(MAX_NESTING):
        num_items += sum(map(len, level))
        if num_items > MAX_ITEMS:
            raise RequestError(f"the body has more than {MAX_ITEMS} values; send fewer")
        level = _containers(child for each in level for child in (each.values() if isinstance(each, dict) else each))
        if not level:
            return
    raise RequestError(f"the body is nested more than {MAX_NESTING} levels deep; flatten it")


def _containers(values: Iterable[Any]) -> list[dict[str, Any] | list[Any]]:
    return [value for value in values if isinstance(value, dict | list)]


def check_lengths(fields: Mapping[str, Any]) -> None:
    """Check MAX_LENGTHS and stop strings. Raises RequestError that names the field."""
    for name, limit in MAX_LENGTHS.items():
        value = fields.get(name)
        if isinstance(value, str | list | dict) and len(value) > limit:
            raise RequestError(f"{name} has length {len(value)}; the limit is {limit}, send fewer", name)
    stops = fields.get("stop")
    for stop in stops if isinstance(stops, list) else [stops]:
        if isinstance(stop, str) and len(stop) > MAX_STOP_CHARS:
            raise RequestError(f"a stop string has {len(stop)} characters; the limit is {MAX_STOP_CHARS}", "stop")
