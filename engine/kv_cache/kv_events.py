"""Changes of the prefix cache since they were last reported."""

from __future__ import annotations


class KVEvents:
    """Digests added and removed since the last ``take``. A digest that was added and removed again cancels out."""

    def __init__(self) -> None:
        self._added: dict[bytes, None] = {}  # oldest first
        self._removed: dict[bytes, None] = {}

    def __bool__(self) -> bool:
        return bool(self._added or self._removed)

    def add(self, digest: bytes) -> None:
        _move(digest, self._removed, self._added)

    def remove(self, digest: bytes) -> None:
        _move(digest, self._added, self._removed)

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Return and forget the digests added and the digests removed."""
        changes = list(self._added), list(self._removed)
        self._added.clear()
        self._removed.clear()
        return changes


def _move(digest: bytes, source: dict[bytes, None], target: dict[bytes, None]) -> None:
    """Undo an opposite change that was not reported yet, or record this one."""
    if digest in source:
        del source[digest]
    else:
        target[digest] = None
