"""Changes of the prefix cache with the tokens of its blocks, as the core tells of them."""

from __future__ import annotations

from collections.abc import Collection

from engine.sequence import Sequence
from pdserve.ipc.cache_changes import BlockKey, CacheChanges, Medium


class CacheRecorder:
    """The interface, and a node whose changes are not recorded. engine/kv_events/ records them."""

    def store(self, sequence: Sequence, index: int, group: int) -> None:
        """Logical block ``index`` of a sequence has entered the cache of a group."""

    def remove(self, keys: Collection[BlockKey]) -> None:
        """Blocks have left the cache."""

    def tier_changed(self, medium: Medium, key: BlockKey, *, added: bool) -> None:
        """A tier behind the cache has a block now, or has lost it."""

    def states(self, group: int) -> CacheRecorder:
        """Return the recorder of snapshots of recurrent states, which are blocks of this further group."""
        return self

    def clear(self) -> None:
        """The cache has been emptied, with all tiers."""

    def take(self) -> list[CacheChanges]:
        """Return and forget the changes since the last call: one record, or none."""
        return []
