"""Writes of blocks from host memory to disk: each block soon after it was stored, as far as the disk keeps up."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, islice

from engine.tiers.areas import Area
from engine.tiers.disk_index import DiskIndex
from engine.tiers.host_pool import HostEntry, HostWatcher
from pdserve.ipc.cache_changes import BlockKey
from pdserve.ipc.messages import Totals
from pdserve.kv.disk_transfers import BlockName, DiskOrder, DiskResult, DiskWork, Outcome

_WRITES = 2  # in flight: one is written while the other one is reported
_HELD_SHARE = 1 / 8  # largest share of host memory in a write in flight: its blocks cannot be evicted


class DiskArea(HostWatcher):
    """Blocks of the KV cache, or slots of recurrent state: on disk, and in host memory to be written."""

    def __init__(self, area: Area, index: DiskIndex, batch: int, slot: bool, totals: Totals) -> None:
        """``batch``: most blocks of a write."""
        self.area = area
        self.index = index
        self.slot = slot
        self.faulty: list[BlockName] = []  # files to remove: their blocks had other bytes than written
        self._batch = batch
        self._totals = totals
        self._waiting: dict[BlockKey, HostEntry] = {}  # oldest first
        area.below = index
        area.host.watchers.append(self)

    def name(self, key: BlockKey, digest: int) -> BlockName:
        group, block_hash = key
        return BlockName(self.slot, group, block_hash, digest)

    @property
    def due(self) -> bool:
        return bool(self._waiting)

    def added(self, entry: HostEntry) -> None:
        if entry.key not in self.index and entry.verified:
            self._waiting[entry.key] = entry

    def dropped(self, entry: HostEntry) -> None:
        if self._waiting.pop(entry.key, None) is not None:
            self._totals.disk_kv_missed_blocks += 1

    def found_faulty(self, entry: HostEntry) -> None:
        assert entry.digest is not None
        self.index.remove(entry.key)
        self.faulty.append(self.name(entry.key, entry.digest))

    def next_write(self) -> list[HostEntry]:
        """Return the blocks to write next. They do not wait any more."""
        most = max(1, min(self._batch, int(self.area.host.total * _HELD_SHARE)))
        entries = list(islice(self._waiting.values(), most))
        for entry in entries:
            del self._waiting[entry.key]
        return [entry for entry in entries if entry.key not in self.index]

    def forget(self) -> None:
        """Forget all blocks: the weights have changed."""
        self._waiting.clear()
        self.faulty.clear()
        self.index.clear()


@dataclass(slots=True, eq=False)
class _Write:
    part: DiskArea
    entries: list[HostEntry]
    forgotten: bool = False  # the weights have changed meanwhile


class DiskWrites:
    """The writes in flight of one node. ``numbers`` yields ids of transfers."""

    def __init__(self, parts: list[DiskArea], numbers: count[int]) -> None:
        self._parts = parts
        self._numbers = numbers
        self._writes: dict[int, _Write] = {}  # by number of the transfer

    @property
    def due(self) -> bool:
        """Whether ``order`` may return orders."""
        return any(part.faulty or (part.due and len(self._writes) < _WRITES) for part in self._parts)

    def order(self) -> list[DiskOrder]:
        """Begin the next writes, and remove faulty files."""
        orders = []
        for part in self._parts:
            if part.faulty:
                names = tuple(part.faulty)
                part.faulty = []
                orders.append(DiskOrder(next(self._numbers), DiskWork.REMOVE, names, (0,) * len(names)))
            while len(self._writes) < _WRITES and part.due:
                if entries := part.next_write():
                    orders.append(self._begin(_Write(part, entries)))
        return orders

    def _begin(self, write: _Write) -> DiskOrder:
        number = next(self._numbers)
        part = write.part
        self._writes[number] = write
        names = []
        for entry in write.entries:
            assert entry.digest is not None, "KV on disk needs digests"
            part.area.host.pin(entry)
            names.append(part.name(entry.key, entry.digest))
        return DiskOrder(number, DiskWork.WRITE, tuple(names), tuple(entry.block for entry in write.entries))

    def ended(self, result: DiskResult) -> None:
        """Let written blocks be found. Unknown numbers belong to removals."""
        write = self._writes.pop(result.order_id, None)
        if write is None:
            return
        for entry, outcome in zip(write.entries, result.outcomes, strict=True):
            write.part.area.host.unpin(entry)
            if outcome == Outcome.DONE and not write.forgotten:
                assert entry.digest is not None
                write.part.index.add(entry.key, entry.digest)

    def forget(self) -> None:
        """Forget writes in flight: their blocks belong to the old weights."""
        for write in self._writes.values():
            write.forgotten = True
