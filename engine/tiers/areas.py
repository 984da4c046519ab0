"""Blocks of the KV cache and slots of recurrent state, with what the tiers behind the prefix cache have of them.

device   pool, with the prefix cache     ─┐
host     host memory (host_pool.py)       ├─ found by block hash and KV cache group
below    a tier behind host memory       ─┘
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from engine.kv_cache.block_pool import BlockPool, CacheWatcher, Use, longest_prefix
from engine.tiers.host_pool import HostPool
from pdserve.ipc.cache_changes import BlockKey
from pdserve.ipc.key_changes import KeyChanges
from pdserve.ipc.messages import Totals
from pdserve.kv.groups import KVCacheGroups, Windows, first_seen

_FREE_SHARE = 1 / 16  # share of blocks that stores leave free, since a sequence waits for the blocks of a store
_NOTHING: frozenset[BlockKey] = frozenset()


@dataclass(slots=True, eq=False)
class Area:
    """Blocks of the KV cache, or slots of recurrent state: on the device, in host memory, and below."""

    pool: BlockPool
    host: HostPool
    batch: int  # most blocks of a store
    below: Container[BlockKey] = _NOTHING  # keys that a tier behind host memory has
    waiting: dict[BlockKey, int] = field(default_factory=dict)  # cached and to be stored, oldest first
    storing: set[BlockKey] = field(default_factory=set)

    def next_store(self) -> list[tuple[BlockKey, int]]:
        """Return the blocks that the next store copies. It leaves some blocks free."""
        if not (self.waiting and self.host.has_room):
            return []
        left = self.pool.count(Use.FREE) - int(self.pool.total * _FREE_SHARE) - 1
        store = []
        for key, block in islice(self.waiting.items(), self.batch):
            left -= self.pool.count_free((block,))
            if left < 0:
                break
            store.append((key, block))
        return store

    def has_behind(self, key: BlockKey) -> bool:
        """Whether a tier behind the device has a block."""
        return key in self.host or key in self.below

    def on_device(self, key: BlockKey) -> bool:
        return key[1] in self.pool.cached(key[0])


class Available:
    """Hashes of the blocks of a group that are on the device or in host memory; with ``below`` also behind it."""

    def __init__(self, area: Area, group: int, below: bool) -> None:
        self._cached = area.pool.cached(group)
        self._host = area.host
        self._below = area.below if below else _NOTHING
        self._group = group

    def __contains__(self, block_hash: object) -> bool:
        if block_hash in self._cached:
            return True
        key = (self._group, block_hash)
        return key in self._host or key in self._below


class Place(NamedTuple):
    """A block of a prefix: its area, KV cache group and logical block."""

    area: Area
    group: int
    at: int


class Areas:
    """The areas of one node: blocks, and slots if the model has recurrent layers."""

    def __init__(self, kv: Area, slots: Area | None, groups: KVCacheGroups, block_size: int) -> None:
        self.kv = kv
        self.slots = slots
        self._groups = groups
        self._block_size = block_size

    def __iter__(self) -> Iterator[Area]:
        yield self.kv
        if self.slots is not None:
            yield self.slots

    def longest(self, hashes: Iterable[bytes], with_state: bool, below: bool = False) -> list[bytes]:
        """Return the longest prefix of a hash chain that a sequence could use entirely, without computing any of it.

        ``with_state``: it ends with a recurrent state.
        """
        has = [Available(self.kv, group, below) for group in range(self._groups.num_groups)]
        chain = longest_prefix(has, self._groups.windows, hashes, self._block_size)
        if with_state and self.slots is not None:
            has_state = Available(self.slots, 0, below)
            while chain and chain[-1] not in has_state:
                chain.pop()
        return chain

    def may_continue_below(self, hashes: Iterable[bytes], num_known: int) -> bool:
        """Whether ``longest`` may be more than ``num_known`` blocks with what is below. It is cheap for full groups."""
        block_hash = next(islice(hashes, num_known, None), None)
        if block_hash is None:
            return False
        if self.slots is not None or any(window is not None for window in self._groups.windows):
            return True
        groups = range(self._groups.num_groups)
        return all(block_hash in Available(self.kv, group, below=True) for group in groups)

    def places(self, chain: list[bytes], with_state: bool) -> Iterator[Place]:
        """Yield the blocks that a sequence needs of a prefix, by group, and then the state at its end."""
        size = self._block_size
        for group, window in enumerate(self._groups.windows):
            for index in range(first_seen(len(chain) * size, window, size), len(chain)):
                yield Place(self.kv, group, index)
        if with_state and self.slots is not None and chain:
            yield Place(self.slots, 0, len(chain) - 1)


class AreaWatcher(CacheWatcher):
    """Queues blocks for stores when they enter the prefix cache, or when a sequence ends that has used them.

    Blocks of groups with a window wait for that end: other prompts hardly use blocks that the window has passed.
    """

    def __init__(self, area: Area, windows: Windows, totals: Totals, changes: KeyChanges[bytes] | None = None) -> None:
        """``changes``: where they report changes of the first group's blocks over all tiers."""
        self._area = area
        self._windows = windows
        self._totals = totals
        self._changes = changes
        self._quiet = False

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Ignore the end of users meanwhile: none of them was a sequence."""
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    def entered(self, key: BlockKey, block: int) -> None:
        if key in self._area.host:
            return
        self._record(key, added=True)
        if self._windows[key[0]] is None:
            self._area.waiting[key] = block

    def unused(self, key: BlockKey, block: int) -> None:
        if self._quiet:
            return
        if key in self._area.host:
            self._area.host.use(key)
        elif key not in self._area.storing:
            self._area.waiting.setdefault(key, block)

    def left(self, keys: Collection[BlockKey]) -> None:
        waiting = self._area.waiting
        if waiting:
            self._totals.host_kv_missed_blocks += sum(waiting.pop(key, None) is not None for key in keys)
        for key in keys:
            self._record(key, added=False)

    def forgotten(self, key: BlockKey) -> None:
        self._area.waiting.pop(key, None)
        self._area.host.drop(key)

    def _record(self, key: BlockKey, added: bool) -> None:
        group, block_hash = key
        if self._changes is not None and not group and not self._area.has_behind(key):
            (self._changes.add if added else self._changes.remove)(block_hash)
