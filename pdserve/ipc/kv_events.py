"""Changes of the prefix cache since they were last reported."""

from __future__ import annotations

from collections.abc import Iterable


class KVEvents:
    """Block hashes added and removed since the last ``take``. A hash that was added and removed again cancels out."""

    def __init__(self) -> None:
        self._added: dict[bytes, None] = {}  # oldest first
        self._removed: dict[bytes, None] = {}

    def __bool__(self) -> bool:
        return bool(self._added or self._removed)

    def add(self, *block_hashes: bytes) -> None:
        _record(block_hashes, self._added, opposite=self._removed)

    def remove(self, *block_hashes: bytes) -> None:
        _record(block_hashes, self._removed, opposite=self._added)

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Return and forget the added and the removed block hashes."""
        added, removed = list(self._added), list(self._removed)
        self._added.clear()
        self._removed.clear()
        return added, removed


def _record(block_hashes: Iterable[bytes], changes: dict[bytes, None], opposite: dict[bytes, None]) -> None:
    """Record changes, or undo the opposite ones that were not reported yet."""
    for block_hash in block_hashes:
        if block_hash in opposite:
            del opposite[block_hash]
        else:
            changes[block_hash] = None
