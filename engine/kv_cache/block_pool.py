"""Use of each KV block, and the prefix cache over the blocks.

    free ──take──► held ──move──► leased        P: a peer may read it          ──drop──► free
                     │
                     └────move──► quarantined   D: a transfer may write to it  ──drop──► free

A block may have several users, such as a prefix that one request holds and another leases. It counts once, as its
strongest use: quarantined before leased before held. So ``free + held + leased + quarantined = total`` always holds.
A free block may still be cached: its content is found by hash until the block is allocated again.

With several KV cache groups (pdserve/kv/groups.py), a block belongs to the group that it is cached for. A prefix is
cached if every group has it: full groups all of its blocks, the others the blocks in the window before its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import islice

from engine.kv_cache.cache_recorder import CacheRecorder
from engine.kv_cache.free_runs import FreeRuns
from pdserve.ipc.cache_changes import BlockKey
from pdserve.ipc.key_changes import KeyChanges
from pdserve.kv.groups import NULL_BLOCK, KVCacheGroups, Windows, first_seen

ONE_GROUP = KVCacheGroups()


class Use(IntEnum):
    """Why a block cannot be allocated; a larger value is the stronger use."""

    FREE = 0
    HELD = 1
    LEASED = 2
    QUARANTINED = 3


_WEAKER = ((), (), (Use.HELD,), (Use.LEASED, Use.HELD))  # [use] → weaker uses of a block, strongest first


class CacheWatcher:
    """Learns what becomes of cached blocks; this one ignores it."""

    def entered(self, key: BlockKey, block: int) -> None:
        """A block in use has entered the prefix cache."""

    def unused(self, key: BlockKey, block: int) -> None:
        """The last user of a cached block has dropped it, other than a window that moves on: it may be evicted."""

    def left(self, keys: Collection[BlockKey]) -> None:
        """Blocks have left the prefix cache: they were evicted, or the whole cache was emptied."""

    def forgotten(self, key: BlockKey) -> None:
        """The content of a block is of no more use. The block leaves the cache next."""


class BlockPool:
    """The blocks of one node, with the prefix cache over them. Single-threaded.

    ``events`` belong to the first group, which is a full one if there is any. ``recorder`` has events of all groups.
    """

    def __init__(self, num_blocks: int, block_size: int = 1, groups: KVCacheGroups = ONE_GROUP) -> None:
        self._users: list[list[int]] = [[0] * num_blocks for _ in Use]  # [use][block] → number of users
        self._use: list[Use] = [Use.FREE] * num_blocks
        self._counts = [num_blocks, 0, 0, 0]
        self._free = FreeRuns(num_blocks)  # free and not cached
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free and cached, least recently used first
        self.groups = groups
        self._block_size = block_size
        self._block_of: list[dict[bytes, int]] = [{} for _ in groups.windows]  # [group][hash]
        self._key_of: dict[int, BlockKey] = {}
        self.events = KeyChanges[bytes]()
        self.recorder = CacheRecorder()
        self.watcher = CacheWatcher()

    @property
    def total(self) -> int:
        return len(self._use)

    def count(self, use: Use) -> int:
        return self._counts[use]

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Blocks that are free, held, leased, quarantined."""
        free, held, leased, quarantined = self._counts
        return free, held, leased, quarantined

    def count_free(self, blocks: Iterable[int]) -> int:
        return sum(self._use[block] is Use.FREE for block in blocks)

    def any_unheld(self, blocks: Iterable[int]) -> bool:
        """Whether one of these blocks has no holder."""
        held = self._users[Use.HELD]
        return any(not held[block] for block in blocks)

    def only_leased(self, block: int) -> bool:
        """Whether a block is leased and has no other use: it is free when its leases end."""
        return self._use[block] is Use.LEASED and not self._users[Use.HELD][block]

    def num_leases(self, block: int) -> int:
        return self._users[Use.LEASED][block]

    def take(self, count: int, after: int | None = None) -> list[int] | None:
        """Allocate ``count`` blocks in few runs, after block ``after`` if possible. Return None if too few are free."""
        if count > self._counts[Use.FREE]:
            return None
        if (missing := count - len(self._free)) > 0:
            oldest = list(islice(self._evictable, missing))
            self._evict(oldest)
            self._release(oldest)
        blocks = self._free.take(count, after)
        users = self._users[Use.HELD]
        for block in blocks:
            users[block] = 1  # a free block has none
            self._use[block] = Use.HELD
        self._counts[Use.FREE] -= count
        self._counts[Use.HELD] += count
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to blocks that ``match`` found."""
        for block in blocks:
            self._add_user(block, Use.HELD)

    def lease(self, blocks: Iterable[int]) -> None:
        """Add a lease to held or cached blocks: a peer may read them, also after their holders have dropped them."""
        for block in blocks:
            self._add_user(block, Use.LEASED)

    def move(self, blocks: Iterable[int], source: Use, target: Use) -> None:
        """Change one use of each block into another."""
        for block in blocks:
            self._add_user(block, target)
            self._end_use(block, source)

    def drop(self, blocks: Sequence[int], use: Use, *, passed: bool = False) -> None:
        """End one use of each block. The last block goes first, so that prefixes are evicted from their ends.

        ``passed``: they are behind a window that has moved on.
        """
        uncached = []
        for block in reversed(blocks):
            if self._end_use(block, use) is Use.FREE:
                if (key := self._key_of.get(block)) is not None:
                    self._evictable[block] = None
                    if not passed:
                        self.watcher.unused(key, block)
                else:
                    uncached.append(block)
        self._free.add(*uncached)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of a hash chain, without holding them.

        The list has an entry per logical block and group; it is NULL_BLOCK behind a group's window.
        """
        if self.groups.has_windows or self.groups.num_groups > 1:
            return self._match_windows(hashes)
        blocks = []
        block_of = self._block_of[0]
        for block_hash in hashes:
            block = block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _match_windows(self, hashes: Iterable[bytes]) -> list[int]:
        chain = longest_prefix(self._block_of, self.groups.windows, hashes, self._block_size)
        count = len(chain)
        num_groups = self.groups.num_groups
        entries = [NULL_BLOCK] * (count * num_groups)
        for group, (block_of, window) in enumerate(zip(self._block_of, self.groups.windows, strict=True)):
            begin = first_seen(count * self._block_size, window, self._block_size)
            entries[begin * num_groups + group :: num_groups] = [block_of[block_hash] for block_hash in chain[begin:]]
        return entries

    def cached(self, group: int) -> Mapping[bytes, int]:
        """Return the cached blocks of a group by hash: a live view."""
        return self._block_of[group]

    def find(self, block_hash: bytes) -> int | None:
        """Return the block that is cached under this hash, in the first group."""
        return self._block_of[0].get(block_hash)

    def forget(self, block_hash: bytes) -> None:
        """Remove the block of the first group from the prefix cache. An unknown hash is ignored."""
        block = self.find(block_hash)
        if block is None:
            return
        self.watcher.forgotten(self._key_of[block])
        self._evict((block,))
        if self._use[block] is Use.FREE:
            self._release((block,))

    def cache(self, block_hashes: Sequence[bytes], blocks: Sequence[int], group: int = 0) -> list[int]:
        """Cache blocks, which are in use, under their hashes; NULL_BLOCK is passed over. Return which are new entries.

        Another block with an equal hash keeps its entry.
        """
        block_of = self._block_of[group]
        key_of = self._key_of
        entered = self.watcher.entered
        new = []
        for index, (block_hash, block) in enumerate(zip(block_hashes, blocks, strict=True)):
            if block == NULL_BLOCK or block_hash in block_of or block in key_of:
                continue
            assert self._use[block] is not Use.FREE
            block_of[block_hash] = block
            key_of[block] = key = group, block_hash
            entered(key, block)
            new.append(index)
        if not group:
            self.events.add(*(block_hashes[index] for index in new))
        return new

    def forget_cached(self) -> None:
        """Empty the prefix cache."""
        self._evict(tuple(self._key_of))
        self._release(tuple(self._evictable))
        self.recorder.clear()

    def _evict(self, blocks: Iterable[int]) -> None:
        """Remove blocks from the prefix cache."""
        keys = list(map(self._key_of.pop, blocks))
        for group, block_hash in keys:
            del self._block_of[group][block_hash]
        self.recorder.remove(keys)
        self.watcher.left(keys)
        self.events.remove(*[block_hash for group, block_hash in keys if not group])

    def _release(self, blocks: Sequence[int]) -> None:
        """Free blocks that were evictable and have been evicted."""
        for block in blocks:
            del self._evictable[block]
        self._free.add(*blocks)

    def _add_user(self, block: int, use: Use) -> None:
        """Add a user to a block that is in use or cached."""
        if self._use[block] is Use.FREE:
            del self._evictable[block]
        self._users[use][block] += 1
        if use > self._use[block]:
            self._set_use(block, use)

    def _end_use(self, block: int, use: Use) -> Use:
        """Remove a user. Return the use that the block has now."""
        users = self._users[use]
        users[block] -= 1
        assert users[block] >= 0, f"block {block} was dropped more often than taken as {use.name}"
        if users[block] or self._use[block] is not use:
            return self._use[block]
        for weaker in _WEAKER[use]:
            if self._users[weaker][block]:
                break
        else:
            weaker = Use.FREE
        self._set_use(block, weaker)
        return weaker

    def _set_use(self, block: int, use: Use) -> None:
        self._counts[self._use[block]] -= 1
        self._counts[use] += 1
        self._use[block] = use


def longest_prefix(
    of_groups: Sequence[Container[bytes]], windows: Windows, hashes: Iterable[bytes], block_size: int
) -> list[bytes]:
    """Return the longest prefix of a hash chain that every group has: full groups all of it, the others their window.

    ``of_groups`` tells of each group which hashes it has.
    """
    full = [has for has, window in zip(of_groups, windows, strict=True) if window is None]
    chain = []
    for block_hash in hashes:
        if any(block_hash not in has for has in full):
            break
        chain.append(block_hash)
    count = len(chain)
    before = -1
    while count != before:
        before = count
        for has, window in zip(of_groups, windows, strict=True):
            if window is not None:
                count = _longest(has, window, chain, count, block_size)
    del chain[count:]
    return chain


def _longest(has: Container[bytes], window: int, chain: Sequence[bytes], count: int, block_size: int) -> int:
    """Return the largest number of blocks, up to ``count``, that end with a window that a group has."""
    end = index = count
    while index > first_seen(end * block_size, window, block_size):
        index -= 1
        if chain[index] not in has:
            end = index
    return end
