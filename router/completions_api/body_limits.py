"""How much a request may hold, beyond its size in bytes: what else takes time or memory out of proportion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pdserve.errors import RequestError

MAX_NESTING = 100  # objects and lists within each other
MAX_ITEMS = 200_000  # of all objects and lists but those that hold token ids
MAX_LENGTHS = {  # of single fields
    "messages": 10_000,
    "tools": 1024,
    "documents": 1024,
    "chat_template_kwargs": 64,
    "logit_bias": 1024,
    "stop_token_ids": 1024,
    "cache_salt": 1024,
}
_TOKEN_IDS = ("prompt", "tokens")  # how these may be nested, their types say
MAX_STOP_CHARS = 4096  # of each stop string


def check_shape(fields: Mapping[str, Any]) -> None:
    """Raises RequestError for a body that is nested too deeply, or has too many parts."""
    num_items = 0
    level = _containers(value for name, value in fields.items() if name not in _TOKEN_IDS)
    for _ in range(MAX_NESTING):
        num_items += sum(map(len, level))
        if num_items > MAX_ITEMS:
            raise RequestError(f"the body has more than {MAX_ITEMS} values; send fewer")
        level = _containers(child for each in level for child in (each.values() if isinstance(each, dict) else each))
        if not level:
            return
    raise RequestError(f"the body is nested more than {MAX_NESTING} levels deep; send a flatter one")


def _containers(values: Iterable[Any]) -> list[dict[str, Any] | list[Any]]:
    return [value for value in values if isinstance(value, dict | list)]


def check_lengths(fields: Mapping[str, Any]) -> None:
    """Raises RequestError that names the field with too many entries."""
    for name, limit in MAX_LENGTHS.items():
        value = fields.get(name)
        if isinstance(value, str | list | dict) and len(value) > limit:
            raise RequestError(f"{name} has a length of {len(value)}; it must be at most {limit}", name)
    stops = fields.get("stop")
    for stop in stops if isinstance(stops, list) else [stops]:
        if isinstance(stop, str) and len(stop) > MAX_STOP_CHARS:
            raise RequestError(f"a stop string has {len(stop)} characters; at most {MAX_STOP_CHARS} are served", "stop")
