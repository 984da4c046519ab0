"""The budget of the work on structure that a client gives: schemas, patterns, tools.

A pass over such structure gets the Budget of its request and spends steps for all that it does: one at least for each
key, item or name that it visits or copies, and one for each CHARS_PER_STEP characters that it reads or writes. So a
short text that stands for a long one, by references or combinations, costs what it stands for. A step takes about a
microsecond: some ten lines of Python. A pass has no limit of its own, but it may work in a part of the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from pdserve.errors import RequestError
from pdserve.grammar import MAX_BYTES

MAX_WORK = 2_000_000  # steps for a request, about two seconds of a thread; an ordinary schema takes two for a byte
CHARS_PER_STEP = 16

Result = TypeVar("Result")


class WorkExceeded(RequestError):
    """The structure of a request takes too many steps to convert."""

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            f"its schemas and patterns take more than {budget.limit} steps to convert; simplify or shorten them",
            code="structure_too_complex",
        )
        self.budget = budget


def check_chars(number: int) -> None:
    """Raises RequestError if so many characters of a grammar are too many."""
    if number > MAX_BYTES:
        raise RequestError(f"the grammar takes more than {MAX_BYTES} bytes; simplify it", "grammar")


class Budget:
    """Steps that may still be spent. For one thread at a time."""

    def __init__(self, limit: int = MAX_WORK, parent: Budget | None = None) -> None:
        self.limit = limit
        self.spent = 0
        self._parent = parent

    def spend(self, steps: int = 1) -> None:
        """Raises WorkExceeded, of the outermost budget that is exhausted."""
        if self._parent is not None:
            self._parent.spend(steps)
        self.spent += steps
        if self.spent > self.limit:
            raise WorkExceeded(self)

    def spend_chars(self, number: int) -> None:
        """Spend for characters, or bytes, that are read or written. Raises WorkExceeded."""
        self.spend(1 + number // CHARS_PER_STEP)

    def spend_value(self, value: Any) -> None:
        """Spend for the JSON of a value, of which parts may be shared.

        Raises RequestError for one that is longer than a grammar may be, and WorkExceeded.
        """
        pending = [value]
        num_chars = 0
        while pending:
            part = pending.pop()
            if isinstance(part, str):
                self.spend_chars(len(part))
                num_chars += len(part)
            elif isinstance(part, dict):
                keys = sum(map(len, part))
                self.spend(1 + len(part) + keys // CHARS_PER_STEP)
                num_chars += keys
                pending += part.values()
            elif isinstance(part, list):
                self.spend(1 + len(part))
                num_chars += len(part)
                pending += part
            check_chars(num_chars)

    def encoded(self, value: Any) -> bytes:
        """Return a value as JSON. Raises the errors of ``spend_value`` before there is any JSON."""
        self.spend_value(value)
        return msgspec.json.encode(value)

    def part(self, limit: int) -> Budget:
        """Return a budget of at most ``limit`` steps that are spent here, too."""
        return Budget(limit, self)

    def attempt(self, work: Callable[[Budget], Result]) -> Result | None:
        """Return what ``work`` returns, or None if this part does not suffice. Raises WorkExceeded of the whole."""
        try:
            return work(self)
        except WorkExceeded as exc:
            if exc.budget is not self:
                raise
            return None
