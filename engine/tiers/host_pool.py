"""Blocks of host memory, found by the content of the cached block that was copied there.

    free ──take──► storing ──add──► stored ──pin──► loading ──unpin──► stored
      ▲               │                │               │
      └──give_back────┴─── evicted, or dropped ────────┘ once no load reads it

A stored block that has been of use once stays longer than one that never was (segmented LRU): a scan of long prompts
that never come again evicts none of the prefixes that many prompts share.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from engine.kv_cache.free_runs import FreeRuns
from pdserve.ipc.cache_changes import BlockKey

_PROVEN_SHARE = 4 / 5  # largest share of blocks that were of use; the rest is for new blocks to prove themselves


@dataclass(slots=True, eq=False)
class HostEntry:
    """A stored block. ``digest`` covers its content; None without checksums."""

    key: BlockKey
    block: int
    digest: int | None
    verified: bool = True  # False: it came from a tier below, and its digest has not been compared yet
    uses: int = 0
    loads: int = 0  # loads that read it now
    listed: bool = True  # found by its key
    retired: bool = False  # its memory is faulty


class HostWatcher:
    """Learns what becomes of blocks in host memory; this one ignores it."""

    def added(self, entry: HostEntry) -> None:
        """A block was added, and is found by its key."""

    def dropped(self, entry: HostEntry) -> None:
        """A block was evicted or dropped."""

    def found_faulty(self, entry: HostEntry) -> None:
        """A block that was not verified has another digest. It is dropped next."""


class HostPool:
    """The host memory of one node, for one kind of block. Single-threaded."""

    def __init__(self, num_blocks: int, *watchers: HostWatcher) -> None:
        """``num_blocks``: final size; ``grow`` tells how many are allocated."""
        self.total = 0
        self._free = FreeRuns(num_blocks, filled=False)
        self._entries: dict[BlockKey, HostEntry] = {}
        self._new: OrderedDict[HostEntry, None] = OrderedDict()  # least recently used first, as below
        self._proven: OrderedDict[HostEntry, None] = OrderedDict()
        self.watchers = [*watchers]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    @property
    def num_stored(self) -> int:
        return len(self._entries)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def has_room(self) -> bool:
        """Whether ``take`` would find a block."""
        return bool(len(self._free) or self._new or self._proven)

    def grow(self, num_blocks: int) -> None:
        """Note that ``num_blocks`` blocks are allocated."""
        for block in range(self.total, num_blocks):
            self._free.add(block)
        self.total = max(self.total, num_blocks)

    def find(self, key: BlockKey) -> HostEntry | None:
        return self._entries.get(key)

    def take(self, count: int) -> list[int]:
        """Take up to ``count`` blocks to store into, in few runs. Evict others for that, but none that a load reads."""
        while len(self._free) < count and (evictable := self._new or self._proven):
            entry, _ = evictable.popitem(last=False)
            self._drop(entry)
        return self._free.take(min(count, len(self._free)))

    def give_back(self, blocks: Iterable[int]) -> None:
        """Free blocks that were taken."""
        for block in blocks:
            self._free.add(block)

    def add(self, key: BlockKey, block: int, digest: int | None, *, verified: bool = True) -> bool:
        """Let a block that was taken be found. Return False, and free it, if another one has the same content."""
        if key in self._entries:
            self._free.add(block)
            return False
        entry = self._entries[key] = HostEntry(key, block, digest, verified)
        self._new[entry] = None
        for watcher in self.watchers:
            watcher.added(entry)
        return True

    def use(self, key: BlockKey) -> None:
        """Count a use of a block's content, on the device or from here. An unknown key is ignored."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.uses += 1
        if not entry.loads:
            self._list(entry)

    def pin(self, entry: HostEntry) -> int:
        """Keep a block for a load. Return it."""
        if not entry.loads:
            self._unlist(entry)
        entry.loads += 1
        return entry.block

    def unpin(self, entry: HostEntry) -> None:
        """End the load of a block."""
        entry.loads -= 1
        assert entry.loads >= 0, f"host block {entry.block} was unpinned more often than pinned"
        if entry.loads:
            return
        if entry.listed:
            self._list(entry)
        elif not entry.retired:
            self._free.add(entry.block)

    def drop(self, key: BlockKey) -> None:
        """Forget a block; it is free once no load reads it. An unknown key is ignored."""
        entry = self._entries.get(key)
        if entry is not None:
            self._unlist(entry)
            self._drop(entry)

    def compared(self, entry: HostEntry, right: bool) -> None:
        """The digest of a block was compared. Forget it if it is wrong; memory that changes is never used again."""
        if right:
            entry.verified = True
            return
        entry.retired = entry.verified
        if not entry.listed:
            return
        if not entry.verified:
            for watcher in self.watchers:
                watcher.found_faulty(entry)
        self.drop(entry.key)

    def clear(self) -> None:
        """Forget all blocks."""
        for key in tuple(self._entries):
            self.drop(key)

    def _drop(self, entry: HostEntry) -> None:
        """Forget an entry that is in no list."""
        del self._entries[entry.key]
        entry.listed = False
        if not (entry.loads or entry.retired):
            self._free.add(entry.block)
        for watcher in self.watchers:
            watcher.dropped(entry)

    def _list(self, entry: HostEntry) -> None:
        """Make an entry the most recently used one."""
        self._unlist(entry)
        if entry.uses < 2:  # the first use is the one that it was computed for
            self._new[entry] = None
            return
        self._proven[entry] = None
        if len(self._proven) > _PROVEN_SHARE * self.total:
            oldest, _ = self._proven.popitem(last=False)
            oldest.uses = 0
            self._new[oldest] = None

    def _unlist(self, entry: HostEntry) -> None:
        self._new.pop(entry, None)
        self._proven.pop(entry, None)
