"""Ranges of numbers from outside, declared on the fields of records and messages, and the error for a value outside."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from functools import cache

import msgspec

from pdserve.errors import RequestError, cut, plain


class Range(msgspec.Struct, frozen=True):
    """The values that a field may have, as in ``Annotated[float, Range(0, 1)]``; for a dict or list, its values.

    NaN is in no range.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # ``low`` itself is excluded
    most: int | None = None  # entries of a list; None: any number

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        floor = f"above {plain(self.low)}" if self.above else f"at least {plain(self.low)}"
        ceiling = "" if self.high == math.inf else f" and at most {plain(self.high)}"
        return floor + ceiling

    def check(self, name: str, value: float, param: str | None = None) -> None:
        """Raise RequestError for a value outside. ``param`` is the field, if it is not ``name``."""
        if value not in self:
            raise RequestError(outside(name, value, self), param or name)


def outside(name: str, value: float, allowed: Range) -> str:
    """Return the text of an error for a value outside its range."""
    return f"{name} is {cut(str(value))}; it must be {allowed}"


@cache
def ranges_of(record: type[msgspec.Struct]) -> Mapping[str, Range]:
    """Return the ranges that the fields of a record declare."""
    hints = typing.get_type_hints(record, include_extras=True)
    metadata_of = {name: getattr(hints[name], "__metadata__", ()) for name in record.__struct_fields__}
    return {name: entry for name, metadata in metadata_of.items() for entry in metadata if isinstance(entry, Range)}


def within(name: str, value: float, low: float, high: float, *, above: bool = False, param: str | None = None) -> None:
    """Raise RequestError unless the value is in low … high; ``above`` excludes ``low``. ``param`` is the field."""
    Range(low, high, above).check(name, value, param)
