"""Ranges of numbers in requests, declared on the fields of records, and the error for a value outside."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from functools import cache

import msgspec

from pdserve.errors import RequestError, cut


class Range(msgspec.Struct, frozen=True):
    """The values that a field may have, as in ``Annotated[float, Range(0, 1)]``; for a dict, its values."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # ``low`` itself is excluded

    def check(self, name: str, value: float) -> None:
        """Raise RequestError for a value outside."""
        within(name, value, self.low, self.high, above=self.above)


@cache
def ranges_of(record: type[msgspec.Struct]) -> Mapping[str, Range]:
    """Return the ranges that the fields of a record declare."""
    hints = typing.get_type_hints(record, include_extras=True)
    found = {name: getattr(hints[name], "__metadata__", ()) for name in record.__struct_fields__}
    return {name: each for name, metadata in found.items() for each in metadata if isinstance(each, Range)}


def within(name: str, value: float, low: float, high: float, *, above: bool = False, param: str | None = None) -> None:
    """Raise RequestError unless the value is in low … high; ``above`` excludes ``low``. ``param`` is the field."""
    if (low < value if above else low <= value) and value <= high:
        return
    floor = f"above {low:g}" if above else f"at least {low:g}"
    ceiling = "" if high == math.inf else f" and at most {high:g}"
    raise RequestError(f"{name} is {cut(str(value))}; it must be {floor}{ceiling}", param or name)
