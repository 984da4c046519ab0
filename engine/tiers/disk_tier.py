"""Disk behind host memory: blocks are written there, and come back to host memory before a prompt needs them.

    host   stored ─────────► evicted            read ──► stored again ──► fetched to the device (host_tier.py)
              └─ write ─┐                    ┌─ read ─┘
    disk                └──► file ───────────┘

Writes go through: a block is written soon after it was stored in host memory. A prompt that continues on disk waits for
one read of all that it lacks. Then host memory decides about its fetch as if the blocks had always been there.

A read is ordered only if it is predicted to be faster, with the copy to the device, than to compute its tokens. A disk
that was not measured for long, or was slow, is measured by small reads. No prompt waits for a read longer than its
tokens take to compute.

Host memory keeps the blocks of a read until it has decided about the fetch for its sequence.

Read blocks are not trusted: the device digests them when they are fetched, and the name of a file has the digest.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import count, islice

from engine.kv_cache.cache_parts import CacheParts
from engine.sequence import Sequence
from engine.step_cost_meter import LineFit
from engine.tiers.areas import Area
from engine.tiers.disk_index import DiskIndex
from engine.tiers.disk_writes import DiskArea, DiskWrites
from engine.tiers.host_pool import HostEntry
from engine.tiers.host_tier import HostTier
from engine.tiers.source import Source
from pdserve.ipc.cache_changes import BlockKey, Medium
from pdserve.ipc.messages import Fetched
from pdserve.kv.disk_transfers import (
    AnyDiskOrder,
    BlockName,
    DiskLate,
    DiskListing,
    DiskOrder,
    DiskResult,
    DiskWork,
    OpenDisk,
    Outcome,
)
from pdserve.records import ModelRunnerOutput

_log = logging.getLogger(__name__)

_KEEP = 0.95  # weight of earlier reads after each new one: about 20 count
_PROBE_BLOCKS = 16  # blocks of a prefix that are read to measure a disk
_LEAST_PATIENCE = 0.1  # seconds that a prompt waits for a read, at least: short prompts are computed in a few ms
_READ_SHARE = 1 / 2  # largest share of host memory for reads in flight and blocks not fetched yet


@dataclass(slots=True, eq=False)
class _Read:
    """Blocks on their way to host memory, or there until they are fetched. ``kept``: blocks of the prefix in it."""

    sequence: Sequence
    num_tokens: int  # prompt tokens that this read spares
    names: list[BlockName] = field(default_factory=list)
    parts: list[DiskArea] = field(default_factory=list)  # area of each block
    places: list[int] = field(default_factory=list)  # in host memory
    kept: list[tuple[Area, HostEntry]] = field(default_factory=list)  # pinned; after the read, its blocks, too
    size: float = 0.0  # in blocks
    ordered_at: float = 0.0
    expected: float = 0.0  # predicted seconds; 0: unknown
    compute: float = 0.0  # predicted seconds to compute its tokens; 0: unknown
    forgotten: bool = False  # the weights have changed meanwhile


class DiskTier(Source):
    """Files of a node, behind its host memory."""

    def __init__(self, parts: CacheParts, host: HostTier, *, write_blocks: int, slot_blocks: float = 0.0) -> None:
        """Become the source of ``host``.

        A write has up to ``write_blocks`` blocks. ``slot_blocks``: bytes of a slot of recurrent state, in blocks.
        """
        self._events = parts.events
        self._block_size = parts.block_size
        self._groups = parts.pool.groups
        self._totals = parts.totals
        self._clock = parts.clock
        self._host = host
        host.source = self
        areas = host.areas

        def changed(key: BlockKey, added: bool) -> None:
            areas.kv.pool.recorder.tier_changed(Medium.DISK, key, added=added)
            host.below_changed(key, added)

        index = DiskIndex(changed)
        self._parts = {areas.kv: DiskArea(areas.kv, index, write_blocks, False, self._totals)}
        if areas.slots is not None:
            per_write = max(1, int(write_blocks / max(slot_blocks, 1.0)))
            slots = areas.slots
            index = DiskIndex(lambda key, added: slots.pool.recorder.tier_changed(Medium.DISK, key, added=added))
            self._parts[slots] = DiskArea(slots, index, per_write, True, self._totals)
        self._slot_blocks = slot_blocks
        self._numbers = count(1)  # ids of transfers
        self._writes = DiskWrites(list(self._parts.values()), self._numbers)
        self._cost = LineFit(_KEEP)  # seconds of a read, by blocks
        self._measured_at = 0.0
        self._version = ""  # version of the weights; empty: not known yet
        self._orders: list[AnyDiskOrder] = []
        self._reads: dict[int, _Read] = {}  # by number of the transfer
        self._reading: dict[BlockName, int] = {}  # number of the latest read of a block
        self._waiting: dict[int, int] = {}  # number of the read that a sequence waits for
        self._unfetched: dict[int, _Read] = {}  # ended, by the sequence that will have it fetched
        self._late: set[int] = set()  # reads
        self._considered: set[int] = set()  # sequences

    def use_weights(self, version: str) -> None:
        self._open(version)

    def forget(self) -> None:
        self._open("")
        for part in self._parts.values():
            part.forget()
        self._writes.forget()
        for read in self._reads.values():
            read.forgotten = True

    def _open(self, version: str) -> None:
        self._version = version
        self._orders.append(OpenDisk(version))

    @property
    def num_blocks(self) -> int:
        return len(self._parts[self._host.areas.kv].index)

    # ------------------------------------------------------------ reads

    def considered(self, sequence: Sequence) -> bool:
        return sequence.seq in self._considered

    def reading(self, sequence: Sequence) -> bool:
        return sequence.seq in self._waiting

    def read(self, sequence: Sequence) -> bool:
        if sequence.seq in self._considered or sequence.seq in self._waiting:
            return sequence.seq in self._waiting
        self._considered.add(sequence.seq)
        return self._begin_read(sequence)

    def end(self, sequence: Sequence) -> None:
        self._considered.discard(sequence.seq)
        self._waiting.pop(sequence.seq, None)
        self.let_go(sequence)

    def let_go(self, sequence: Sequence) -> None:
        if (read := self._unfetched.pop(sequence.seq, None)) is not None:
            self._drop_kept(read)

    def _begin_read(self, sequence: Sequence) -> bool:
        """Order a read of blocks that host memory lacks for a sequence, if worthwhile. Return whether it waits."""
        if not self.num_blocks or self._late:
            return False
        whole = self._find(sequence)
        if whole is None:
            return False
        if (same := self._in_flight(whole)) is not None:  # then what it brings is known
            self._waiting[sequence.seq] = same
            self._considered.discard(sequence.seq)
            return True
        seconds = self._host.seconds_to_compute(whole.num_tokens)
        read = self._worthwhile(whole, seconds)
        if read is None or not self._take_places(read):
            return False
        number = next(self._numbers)
        patience = max(_LEAST_PATIENCE, seconds)
        self._orders.append(DiskOrder(number, DiskWork.READ, tuple(read.names), tuple(read.places), patience))
        read.ordered_at = self._clock()
        read.compute = self._host.seconds_to_compute(read.num_tokens)
        read.expected = self._seconds_to_read(read.size)
        if self._cost and read.compute:
            saved = read.compute - read.expected - self._host.seconds_to_fetch(read.size)
            self._totals.disk_kv_expected_saved_seconds += max(0.0, saved)
        self._reads[number] = read
        self._reading |= dict.fromkeys(read.names, number)
        self._waiting[sequence.seq] = number
        return True

    def _in_flight(self, read: _Read) -> int | None:
        """Return the number of a read in flight that shares blocks with this one."""
        return next((number for name in read.names if (number := self._reading.get(name)) is not None), None)

    def _find(self, sequence: Sequence, most: int | None = None) -> _Read | None:
        """Return a read of up to ``most`` blocks of a prefix; None if it would bring nothing."""
        areas = self._host.areas
        with_state = not sequence.request.mode.loads

        def hashes(end: int | None) -> islice[bytes]:
            return islice(sequence.hashes.one_by_one(sequence.token_ids, sequence.reusable), end)

        num_stored = len(areas.longest(hashes(None), with_state))  # on the device or in host memory
        if not areas.may_continue_below(hashes(None), num_stored):
            return None
        taken = sum(read.size for read in (*self._reads.values(), *self._unfetched.values()))
        room = max(0, int(areas.kv.host.total * _READ_SHARE - taken))
        fits = room // self._groups.num_groups
        chain = areas.longest(hashes(num_stored + (fits if most is None else min(fits, most))), with_state, below=True)
        if len(chain) <= num_stored:
            return None
        read = _Read(sequence, (len(chain) - num_stored) * self._block_size)
        for area, group, index in areas.places(chain, with_state):
            key = (group, chain[index])
            if area.on_device(key):
                continue
            if (entry := area.host.find(key)) is not None:
                read.kept.append((area, entry))
                continue
            part = self._parts[area]
            digest = part.index.digest(key)
            assert digest is not None
            read.names.append(part.name(key, digest))
            read.parts.append(part)
            read.size += self._slot_blocks if part.slot else 1.0
        return read if read.names else None

    def _worthwhile(self, whole: _Read, seconds: float) -> _Read | None:
        """Return the read, a small part of it that measures the disk, or None if computing is faster.

        ``seconds``: predicted time to compute its tokens; 0: unknown.
        """
        size = whole.size + sum(read.size for read in self._reads.values())
        fetch = self._host.seconds_to_fetch(whole.size)
        if self._cost and self._cost.line.at(size) + fetch < seconds:
            return whole
        if seconds and self._seconds_to_read(size) + fetch >= seconds:
            return None
        # Without a state near, there is no small part. The patience of the prompt bounds what it costs.
        return self._find(whole.sequence, _PROBE_BLOCKS) or whole

    def _seconds_to_read(self, size: float) -> float:
        """Return the predicted seconds to read ``size`` blocks, lower the longer none was measured."""
        return self._cost.line.aged(self._clock() - self._measured_at).at(size)

    def _take_places(self, read: _Read) -> bool:
        """Take host memory for a read, and keep its prefix's blocks there. Return False if there is too little."""
        for area, entry in read.kept:
            area.host.pin(entry)
        taken = {part: part.area.host.take(read.parts.count(part)) for part in self._parts.values()}
        read.places = [place for places in taken.values() for place in places]  # in the order of ``names``
        if len(read.places) == len(read.names):
            return True
        for part, places in taken.items():
            part.area.host.give_back(places)
        self._drop_kept(read)
        return False

    def _drop_kept(self, read: _Read) -> None:
        for area, entry in read.kept:
            area.host.unpin(entry)

    def _ended(self, result: DiskResult) -> None:
        """End a read: give its blocks to host memory."""
        read = self._reads.pop(result.order_id)
        if result.order_id in self._late:
            self._late.remove(result.order_id)
        else:
            self._report(read, succeeded=not (any(result.outcomes) or read.forgotten))
        self._totals.disk_kv_load_bytes += result.num_bytes
        self._totals.disk_kv_load_seconds += result.seconds
        for name, part, place, outcome in zip(read.names, read.parts, read.places, result.outcomes, strict=True):
            key = (name.group, name.block_hash)
            if outcome == Outcome.DONE and not read.forgotten:
                part.area.host.add(key, place, name.digest, verified=False)
                entry = part.area.host.find(key)
                assert entry is not None
                part.area.host.pin(entry)
                read.kept.append((part.area, entry))
                continue
            part.area.host.give_back((place,))
            if outcome == Outcome.MISSING and not read.forgotten:
                part.index.remove(key)
        self._keep(read, result.order_id)
        if not any(result.outcomes):
            now = self._clock()
            self._cost.add(read.size, now - max(read.ordered_at, self._measured_at))
            self._measured_at = now
        for name in read.names:
            if self._reading.get(name) == result.order_id:
                del self._reading[name]
        self._stop_waiting(result.order_id)

    def _keep(self, read: _Read, number: int) -> None:
        """Keep the blocks of a read until they are fetched, if its sequence waits for it."""
        sequence = read.sequence
        if self._waiting.get(sequence.seq) != number:
            self._drop_kept(read)
            return
        if (former := self._unfetched.get(sequence.seq)) is not None:
            self._drop_kept(former)
        self._unfetched[sequence.seq] = read

    def _report(self, read: _Read, *, succeeded: bool) -> None:
        """Report a read for which no sequence waits any longer, and count the time that it has saved, or lost."""
        seconds = self._clock() - read.ordered_at
        num_tokens = read.num_tokens if succeeded else 0
        fetched = Fetched(read.sequence.rid, Medium.DISK, num_tokens, seconds, read.expected, read.compute)
        self._events.fetched.append(fetched)
        if read.compute:
            saved = read.compute * succeeded - seconds
            self._totals.disk_kv_saved_seconds += max(0.0, saved)
            self._totals.disk_kv_lost_seconds += max(0.0, -saved)

    def _is_late(self, number: int) -> None:
        """Stop waiting for a read that takes longer than computing its tokens."""
        if number not in self._reads:
            return
        self._late.add(number)
        self._report(self._reads[number], succeeded=False)
        self._totals.disk_kv_late_reads += 1
        self._stop_waiting(number)

    def _stop_waiting(self, number: int) -> None:
        for seq in [seq for seq, waits_for in self._waiting.items() if waits_for == number]:
            del self._waiting[seq]

    # ------------------------------------------------------------ orders and results

    @property
    def has_orders(self) -> bool:
        return bool(self._orders) or (bool(self._version) and self._writes.due)

    def take_orders(self) -> tuple[AnyDiskOrder, ...]:
        if self._version:
            self._orders += self._writes.order()
        orders = tuple(self._orders)
        self._orders = []
        return orders

    def update(self, output: ModelRunnerOutput) -> None:
        for event in output.connector.disk:
            match event:
                case DiskResult():
                    self._take_result(event)
                case DiskLate(number):
                    self._is_late(number)
                case DiskListing():
                    self._take_listing(event)

    def _take_result(self, result: DiskResult) -> None:
        self._totals.disk_kv_failures += result.num_failed
        self._totals.disk_kv_evicted_blocks += result.num_evicted
        self._events.status_changed = True
        if result.order_id in self._reads:
            self._ended(result)
        else:
            self._totals.disk_kv_store_bytes += result.num_bytes
            self._writes.ended(result)

    def _take_listing(self, listing: DiskListing) -> None:
        if listing.version != self._version:
            return
        parts = {part.slot: part for part in self._parts.values()}
        if listing.begins:
            for part in self._parts.values():
                part.index.begin_scan()
        for name in listing.names:
            if name.slot in parts:
                parts[name.slot].index.add((name.group, name.block_hash), name.digest)
        if listing.ends:
            for part in self._parts.values():
                part.index.end_scan()
        self._events.status_changed = True
