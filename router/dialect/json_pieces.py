"""JSON of large responses in pieces, so that encoding one never holds the event loop for long.

choice = CompletionChoice(…, token_ids=lazy_numbers(token_ids))
for chunk in json_chunks(Completion(…, choices=[choice])):
    …  # meanwhile, only one part of a lazy list exists as objects
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec
from msgspec import UNSET

_CHUNK_BYTES = 64 * 1024  # about a millisecond of encoding
_TEXT_CHARS = 64 * 1024  # characters per piece of a string
_PART_ITEMS = 1024  # items per part of an array

_encode = msgspec.json.encode
Item = TypeVar("Item")


class _LazyList:
    def __init__(self, make: Callable[[], Iterable[Sequence[Any]]]) -> None:
        self.make = make


def lazy_list(make: Callable[[], Iterable[Sequence[Item]]]) -> list[Item]:
    """Return a stand-in for a list in a response object. ``make`` returns its items in parts, for each encoding."""
    return cast("list[Item]", _LazyList(make))


def lazy_numbers(numbers: Sequence[int]) -> list[int]:
    """Return a stand-in for a list of the numbers in an array."""
    return lazy_list(lambda: map(list, parts(numbers)))


def parts(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Yield slices of a bounded length."""
    return (items[start : start + _PART_ITEMS] for start in range(0, len(items), _PART_ITEMS))


def json_chunks(value: Any) -> Iterator[bytes]:
    """Yield the JSON that msgspec would return for a response object, in chunks that take about a millisecond each."""
    return in_chunks(json_pieces(value))


def in_chunks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join small pieces."""
    parts: list[bytes] = []
    size = 0
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size >= _CHUNK_BYTES:
            yield b"".join(parts)
            parts = []
            size = 0
    if parts:
        yield b"".join(parts)


def json_pieces(value: Any) -> Iterator[bytes]:
    """Yield JSON. Objects, lists of structs, lazy lists and long strings come in pieces."""
    match value:
        case _LazyList():
            yield from _list_pieces([_encode(part)[1:-1]] for part in value.make() if part)
        case [msgspec.Struct(), *_]:
            yield from _list_pieces(map(json_pieces, value))
        case msgspec.Struct():
            yield from _object_pieces(_fields(value))
        case dict():
            yield from _object_pieces(value)
        case str() if len(value) > _TEXT_CHARS:
            starts = range(0, len(value), _TEXT_CHARS)
            yield b'"'
            yield from (_encode(value[start : start + _TEXT_CHARS])[1:-1] for start in starts)
            yield b'"'
        case _:
            yield _encode(value)


def _list_pieces(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    before = b"["
    for item in items:
        yield before
        yield from item
        before = b","
    yield b"]" if before == b"," else b"[]"


def _object_pieces(fields: Mapping[str, Any]) -> Iterator[bytes]:
    before = b"{"
    for name, value in fields.items():
        yield before + _encode(name) + b":"
        yield from json_pieces(value)
        before = b","
    yield b"}" if before == b"," else b"{}"


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    config = struct.__struct_config__
    tag: dict[str, Any] = {} if config.tag is None else {str(config.tag_field): config.tag}
    values = ((name, getattr(struct, name)) for name in struct.__struct_fields__)
    return tag | {name: value for name, value in values if value is not UNSET}
