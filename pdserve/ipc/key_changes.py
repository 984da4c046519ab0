"""Changes of the prefix cache since they were last reported."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class KeyChanges(Generic[K]):
    """Keys of blocks added and removed since the last ``take``. A key that was added and removed again cancels out."""

    def __init__(self) -> None:
        self._added: dict[K, None] = {}  # oldest first
        self._removed: dict[K, None] = {}

    def __bool__(self) -> bool:
        return bool(self._added or self._removed)

    def add(self, *keys: K) -> None:
        _record(keys, self._added, opposite=self._removed)

    def remove(self, *keys: K) -> None:
        _record(keys, self._removed, opposite=self._added)

    def take(self) -> tuple[list[K], list[K]]:
        """Return and forget the added and the removed keys."""
        added = list(self._added)
        removed = list(self._removed)
        self.clear()
        return added, removed

    def clear(self) -> None:
        """Forget all changes."""
        self._added.clear()
        self._removed.clear()


def _record(keys: Iterable[K], changes: dict[K, None], opposite: dict[K, None]) -> None:
    """Record changes, or undo the opposite ones that were not reported yet."""
    if not opposite:
        changes.update(dict.fromkeys(keys))
        return
    for key in keys:
        if key in opposite:
            del opposite[key]
        else:
            changes[key] = None
