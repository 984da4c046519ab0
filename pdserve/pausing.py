"""Work with pauses: a generator that yields in each pause, and returns the result.

The caller decides what happens in a pause. The step loop emits results of an earlier step; others ``complete`` all.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Pausing: TypeAlias = Generator[None, None, T]


def complete(work: Pausing[T]) -> T:
    """Do the work without pauses, and return the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def completed(result: T) -> Pausing[T]:
    """Return work that is done, and has no pause."""
    return result
    yield  # makes this a generator
