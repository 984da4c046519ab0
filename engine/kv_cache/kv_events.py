"""Changes of the prefix cache since they were last reported."""

from __future__ import annotations


class KVEvents:
    """Block hashes added and removed since the last ``take``. A hash that was added and removed again cancels out."""

    def __init__(self) -> None:
        self._added: dict[bytes, None] = {}  # oldest first
        self._removed: dict[bytes, None] = {}

    def __bool__(self) -> bool:
        return bool(self._added or self._removed)

    def add(self, block_hash: bytes) -> None:
        _move(block_hash, self._removed, self._added)

    def remove(self, block_hash: bytes) -> None:
        _move(block_hash, self._added, self._removed)

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Return and forget the added and the removed block hashes."""
        changes = list(self._added), list(self._removed)
        self._added.clear()
        self._removed.clear()
        return changes


def _move(block_hash: bytes, source: dict[bytes, None], target: dict[bytes, None]) -> None:
    """Undo an opposite change that was not reported yet, or record this one."""
    if block_hash in source:
        del source[block_hash]
    else:
        target[block_hash] = None
