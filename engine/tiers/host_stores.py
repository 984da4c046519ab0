"""Stores of cached blocks in host memory, in small batches beside steps.

A store has ended when its blocks are copied and, with checksums, digested: both in any order. Until then its blocks
have a lease, so nothing overwrites them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count

from engine.kv_cache.block_pool import Use
from engine.kv_cache.digest_orders import TakeDigests
from engine.tiers.areas import Area, Areas
from pdserve.ipc.cache_changes import BlockKey
from pdserve.kv.host_copies import CopyResult, HostCopy

_log = logging.getLogger(__name__)

STORE_BYTES = 32 << 20  # most bytes of a store on each rank: a fraction of a millisecond at the speed of PCIe
_STORES = 2  # in flight: one is copied while the other one is reported

#: Orders the digests of blocks of an area: (area, blocks, groups of the blocks, taker).
OrderDigests = Callable[[Area, list[int], tuple[int, ...], TakeDigests], None]


@dataclass(slots=True, eq=False)
class _Store:
    """A copy to host memory. It ends with its copy and its digests."""

    area: Area
    keys: list[BlockKey]
    blocks: list[int]
    host_blocks: list[int]
    digests: tuple[int | None, ...] | None = None
    result: CopyResult | None = None
    forgotten: bool = False  # the weights have changed meanwhile


class HostStores:
    """The stores in flight of one node. ``numbers`` yields ids of copies."""

    def __init__(
        self,
        areas: Areas,
        numbers: count[int],
        order_digests: OrderDigests | None,
        quietly: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Without ``order_digests``, stored blocks have no digests."""
        self._areas = areas
        self._numbers = numbers
        self._order_digests = order_digests
        self._quietly = quietly
        self._stores: dict[int, _Store] = {}  # by number of the copy

    @property
    def due(self) -> bool:
        """Whether ``order`` would return copies."""
        return len(self._stores) < _STORES and any(area.next_store() for area in self._areas)

    @property
    def any_unheld(self) -> bool:
        """Whether one of the blocks that are copied has no other user."""
        return any(store.area.pool.any_unheld(store.blocks) for store in self._stores.values())

    def order(self) -> list[HostCopy]:
        """Begin the next stores."""
        copies = []
        for area in self._areas:
            while len(self._stores) < _STORES and (items := area.next_store()):
                host_blocks = area.host.take(len(items))
                keys, blocks = map(list, zip(*items[: len(host_blocks)], strict=True))
                copies.append(self._begin(_Store(area, keys, blocks, host_blocks)))
        return copies

    def _begin(self, store: _Store) -> HostCopy:
        area = store.area
        copy_id = next(self._numbers)
        for key in store.keys:
            del area.waiting[key]
            area.storing.add(key)
        area.pool.lease(store.blocks)
        self._stores[copy_id] = store
        if self._order_digests is None:
            store.digests = (None,) * len(store.blocks)
        else:
            groups = tuple(group for group, _ in store.keys)
            self._order_digests(area, store.blocks, groups, lambda digests: self._digested(copy_id, digests))
        blocks = tuple(store.blocks)
        host_blocks = tuple(store.host_blocks)
        if area is self._areas.kv:
            return HostCopy(copy_id, load=False, blocks=blocks, host_blocks=host_blocks)
        return HostCopy(copy_id, load=False, slots=blocks, host_slots=host_blocks)

    def copied(self, result: CopyResult) -> None:
        self._stores[result.copy_id].result = result
        self._end(result.copy_id)

    def _digested(self, copy_id: int, digests: tuple[int, ...]) -> None:
        self._stores[copy_id].digests = digests
        self._end(copy_id)

    def _end(self, copy_id: int) -> None:
        """Let stored blocks be found, once they are copied and digested."""
        store = self._stores[copy_id]
        if store.digests is None or store.result is None:
            return
        del self._stores[copy_id]
        area = store.area
        area.storing.difference_update(store.keys)
        with self._quietly():
            area.pool.drop(store.blocks, Use.LEASED)
        if store.result.error:
            _log.warning("KV was not copied to host memory: %s", store.result.error)
        if store.result.error or store.forgotten:
            area.host.give_back(store.host_blocks)
            return
        for key, block, digest in zip(store.keys, store.host_blocks, store.digests, strict=True):
            area.host.add(key, block, digest)

    def forget(self) -> None:
        """Forget stores in flight: their blocks belong to the old weights."""
        for store in self._stores.values():
            store.forgotten = True
