"""Rename fields in errors of a chat: the client reads the names of its own protocol."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pdserve.errors import RequestError

FieldNames = Sequence[tuple[re.Pattern[str], str]]  # patterns of a chat's fields, and the names of another protocol


def field_names(*pairs: tuple[str, str]) -> FieldNames:
    return [(re.compile(pattern), name) for pattern, name in pairs]


@contextmanager
def named_as(names: FieldNames) -> Iterator[None]:
    """Rename fields in the errors that are raised inside."""
    try:
        yield
    except RequestError as exc:
        exc.args = (_renamed(str(exc), names),)
        exc.param = None if exc.param is None else _renamed(exc.param, names)
        raise


def _renamed(text: str, names: FieldNames) -> str:
    for pattern, name in names:
        text = pattern.sub(name, text)
    return text
