"""Index of the blocks on disk that this node knows, with the digests that are part of their names.

A scan of the directory finds blocks written before the node started, and by other nodes. A block that it does not find
again is gone. While a scan lists, blocks move from ``_before`` to ``_found``, so no call takes longer for many blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from pdserve.ipc.cache_changes import BlockKey

MOST = 1_000_000  # blocks, of some 250 bytes of memory each


class DiskIndex:
    """The blocks of one area. ``changed`` is called with each key that is added or removed, and whether it is there."""

    def __init__(self, changed: Callable[[BlockKey, bool], None] = lambda key, added: None, most: int = MOST) -> None:
        self._found: dict[BlockKey, int] = {}  # digest by key
        self._before: dict[BlockKey, int] = {}  # not found by the scan that lists now
        self._changed = changed
        self._most = most

    def __contains__(self, key: object) -> bool:
        return key in self._found or key in self._before

    def __len__(self) -> int:
        return len(self._found) + len(self._before)

    def digest(self, key: BlockKey) -> int | None:
        """Return the digest of a block; None if it is not there."""
        return self._found.get(key, self._before.get(key))

    def add(self, key: BlockKey, digest: int) -> None:
        """A block is on disk. Ignored if there is one with another digest, or if the index is full."""
        own_digest = self.digest(key)
        if own_digest is None and len(self) < self._most:
            self._found[key] = digest
            self._changed(key, True)
        elif own_digest == digest:
            self._before.pop(key, None)
            self._found[key] = digest

    def remove(self, key: BlockKey) -> None:
        """A block is gone. An unknown key is ignored."""
        if key in self:
            self._found.pop(key, None)
            self._before.pop(key, None)
            self._changed(key, False)

    def begin_scan(self) -> None:
        """Begin a scan, which adds all blocks on disk again. ``end_scan`` drops the others."""
        for key, digest in self._before.items():  # an earlier scan has not ended
            self._found.setdefault(key, digest)
        self._before = self._found
        self._found = {}

    def end_scan(self) -> None:
        """Drop the blocks that the scan has not found."""
        gone = self._before
        self._before = {}
        for key in gone:
            self._changed(key, False)

    def clear(self) -> None:
        gone = chain(self._before, self._found)
        self._before = {}
        self._found = {}
        for key in gone:
            self._changed(key, False)
