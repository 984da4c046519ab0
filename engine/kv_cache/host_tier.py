"""Host memory behind the prefix cache: cached blocks are copied there, and come back before a prompt needs them.

    device   computed ──► cached ─────────► evicted             fetched ──► cached again ──► held by its sequence
                             └─ store ─┐                    ┌─ load ─┘
    host                               └──► stored ─────────┘

Stores are written through: a block is copied soon after it has entered the prefix cache, in small batches beside steps,
so its eviction costs nothing. A block that a store reads has a lease, so nothing overwrites it.

A fetch fills blocks of its own, which nothing else uses before the copy has ended and, with checksums, its digests are
those of the stored blocks. Then they enter the prefix cache. Only there sequences find them: a request that is
cancelled, preempted or sent on meanwhile needs no care. Until its sequence is admitted, the tier holds all blocks of
the prefix for it, unless others lack blocks.

A recurrent state is a block of another kind: it is stored with its own pool, and fetched with the KV before it.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import msgspec

from engine.kv_cache.block_pool import BlockPool, CacheWatcher, Use, longest_prefix
from engine.kv_cache.connector_scheduler import KVConnectorScheduler
from engine.kv_cache.host_pool import HostEntry, HostPool
from engine.kv_cache.tier import Tier
from engine.request import Request, Sequence
from engine.step_cost_meter import LineFit, StepCostMeter
from pdserve.hashing import BlockHashes, root_hash
from pdserve.host_copies import CopyResult, HostCopy, HostRoom
from pdserve.ipc.cache_changes import BlockKey, CacheChanges
from pdserve.ipc.kv_events import KVEvents
from pdserve.ipc.messages import LeaseCached, Mode, Totals
from pdserve.kv_groups import Windows, first_seen
from pdserve.records import KVConnectorOrders, ModelRunnerOutput
from pdserve.request_cost import LinearCost
from pdserve.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

_KEEP = 0.95  # weight of earlier fetches after each new one: about 20 count
STORE_BYTES = 32 << 20  # of a store on each rank, at most: a fraction of a millisecond at the speed of PCIe
_STORES = 2  # in flight: one is copied while the other one is reported
_FREE_SHARE = 1 / 16  # of all blocks: stores leave so many free, since a sequence waits for the blocks of a store


@dataclass(slots=True, eq=False)
class _Area:
    """Blocks of the KV cache, or slots of recurrent state: on the device, and in host memory."""

    pool: BlockPool
    host: HostPool
    batch: int  # most blocks of a store
    waiting: dict[BlockKey, int] = field(default_factory=dict)  # cached and to be stored, oldest first
    storing: set[BlockKey] = field(default_factory=set)

    def next_store(self) -> list[tuple[BlockKey, int]]:
        """Return the blocks that the next store copies. It leaves some blocks free."""
        if not (self.waiting and self.host.has_room):
            return []
        left = self.pool.count(Use.FREE) - int(self.pool.total * _FREE_SHARE) - 1
        found = []
        for key, block in islice(self.waiting.items(), self.batch):
            left -= self.pool.count_free((block,))
            if left < 0:
                break
            found.append((key, block))
        return found


class _AreaWatcher(CacheWatcher):
    """Queues blocks for stores when they enter the prefix cache, or when a sequence ends that has used them.

    Those of groups with a window only then: what the window has passed is hardly of use to other prompts.
    """

    def __init__(
        self, area: _Area, windows: Windows, totals: Callable[[], Totals], changes: KVEvents | None = None
    ) -> None:
        self._area = area
        self._windows = windows
        self._totals = totals
        self._changes = changes
        self.quiet = False  # users that the tier itself drops were of no use to a sequence

    def entered(self, key: BlockKey, block: int) -> None:
        if key in self._area.host:
            return
        self._record(key, added=True)
        if self._windows[key[0]] is None:
            self._area.waiting[key] = block

    def unused(self, key: BlockKey, block: int) -> None:
        if self.quiet:
            return
        if key in self._area.host:
            self._area.host.use(key)
        elif key not in self._area.storing:
            self._area.waiting.setdefault(key, block)

    def left(self, key: BlockKey) -> None:
        if self._area.waiting.pop(key, None) is not None:
            self._totals().host_kv_missed_blocks += 1
        if key not in self._area.host:
            self._record(key, added=False)

    def forgotten(self, key: BlockKey) -> None:
        self._area.waiting.pop(key, None)
        self._area.host.drop(key)

    def _record(self, key: BlockKey, added: bool) -> None:
        group, block_hash = key
        if self._changes is not None and not group:
            (self._changes.add if added else self._changes.remove)(block_hash)


@dataclass(slots=True, eq=False)
class _Store:
    """A copy to host memory. It ends with its copy and its digests."""

    area: _Area
    keys: list[BlockKey]
    blocks: list[int]
    host_blocks: list[int]
    generation: int
    digests: tuple[int | None, ...] | None = None
    result: CopyResult | None = None


@dataclass(slots=True, eq=False)
class _Part:
    """The blocks of one area that a fetch loads."""

    area: _Area
    places: list[tuple[int, int]] = field(default_factory=list)  # logical block and group of each
    entries: list[HostEntry] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Fetch:
    """Cached blocks on their way back, and then blocks that are kept for the sequence."""

    sequence: Sequence
    num_tokens: int  # that need not be computed then
    size: float  # in blocks
    parts: list[_Part]
    kept: list[tuple[_Area, list[int]]] = field(default_factory=list)
    ordered_at: float = 0.0
    generation: int = 0
    awaited: bool = True  # by its sequence, or for a pull
    pull: LeaseCached | None = None  # that is answered at the end
    ended: bool = False


def _sequence_of(message: LeaseCached, block_size: int) -> Sequence:
    """Return a sequence that can use all cached blocks that a peer pulls. It is in no queue."""
    token_ids = array("I", message.token_ids)
    token_ids.append(0)  # the KV of a last token never comes from the cache
    sampling, length = SamplingParams(max_tokens=1), len(token_ids)
    request = Request(message.rid, token_ids.tobytes(), sampling, Mode.LOCAL, message.cache_salt)
    hashes = BlockHashes(block_size, root_hash(message.cache_salt))
    return Sequence(0, request, 0, token_ids, hashes, length, length + 1)


class _Either:
    """Hashes of the cached blocks of a group, on the device or in host memory."""

    def __init__(self, area: _Area, group: int) -> None:
        self._cached = area.pool.cached(group)
        self._host = area.host
        self._group = group

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._cached or (self._group, block_hash) in self._host


class HostTier(Tier):
    """Host memory of a node, before ``behind``."""

    def __init__(
        self,
        behind: KVConnectorScheduler,
        room: HostRoom,
        *,
        checksum: bool,
        store_blocks: int,
        slot_blocks: float = 0.0,
    ) -> None:
        """``room``: once all memory is allocated. A store has up to ``store_blocks`` blocks.

        ``slot_blocks``: bytes of a slot of recurrent state, in blocks.
        """
        super().__init__(behind)
        self._checksum = checksum
        self._slot_blocks = slot_blocks
        self._changes = KVEvents()  # of the first group, in both places together
        most = max(1, self._pool.total // 4)
        self._kv = _Area(self._pool, HostPool(room.num_blocks, self._dropped), min(store_blocks, most))
        self._watchers = [_AreaWatcher(self._kv, self._groups.windows, lambda: self._totals, self._changes)]
        self._areas = [self._kv]
        if self._states is not None:
            per_store = max(1, int(store_blocks / max(slot_blocks, 1.0)))
            self._slots = _Area(self._states.pool, HostPool(room.num_slots), per_store)
            self._watchers.append(_AreaWatcher(self._slots, (None,), lambda: self._totals))
            self._areas.append(self._slots)
        for area, watcher in zip(self._areas, self._watchers, strict=True):
            area.pool.watcher = watcher
        self._meter = StepCostMeter()
        self._totals = Totals()
        self._clock: Callable[[], float] = lambda: 0.0
        self._cost = LineFit(_KEEP)  # seconds of a fetch, by blocks
        self._measured_at = 0.0
        self._allocated = False  # ordered
        self._copies: list[HostCopy] = []
        self._stores: dict[int, _Store] = {}  # by number of the copy
        self._loads: dict[int, _Fetch] = {}  # likewise
        self._fetches: dict[int, _Fetch] = {}  # by sequence that waits
        self._considered: set[int] = set()  # sequences
        self._pulls: dict[int, _Fetch] = {}  # by rid
        self._generation = 0  # of the weights
        self._next_id = 1

    def attach(self, meter: StepCostMeter, totals: Totals, clock: Callable[[], float]) -> None:
        super().attach(meter, totals, clock)
        self._meter = meter
        self._totals = totals
        self._clock = clock

    # ------------------------------------------------------------ fetches

    @property
    def fetches(self) -> bool:
        return True

    def considered(self, sequence: Sequence) -> bool:
        return sequence.seq in self._considered

    def fetching(self, sequence: Sequence) -> bool:
        fetch = self._fetches.get(sequence.seq)
        return fetch is not None and not fetch.ended

    def fetch(self, sequence: Sequence) -> bool:
        if sequence.seq in self._considered:
            return self.fetching(sequence)
        self._considered.add(sequence.seq)
        fetch = self._find(sequence)
        if fetch is None or not self._worthwhile(fetch) or not self._take_blocks(fetch):
            return False
        self._fetches[sequence.seq] = fetch
        self._order_load(fetch)
        return True

    def end_fetch(self, sequence: Sequence) -> None:
        self._considered.discard(sequence.seq)
        fetch = self._fetches.pop(sequence.seq, None)
        if fetch is not None:
            fetch.awaited = False
            if fetch.ended:
                self._drop_kept(fetch)

    def abandon_load(self, sequence: Sequence) -> Collection[int]:
        self.end_fetch(sequence)
        return super().abandon_load(sequence)

    def give_way(self) -> bool:
        kept = [fetch for fetch in self._fetches.values() if fetch.ended and fetch.kept]
        for fetch in kept:
            self._drop_kept(fetch)
        return bool(kept)

    @property
    def copying(self) -> bool:
        return bool(self._loads) or any(store.area.pool.any_unheld(store.blocks) for store in self._stores.values())

    def forget_stored(self) -> None:
        self._generation += 1
        for area in self._areas:
            area.waiting.clear()
            area.host.clear()

    @property
    def host_blocks(self) -> tuple[int, int]:
        return self._kv.host.num_free, self._kv.host.num_stored

    def _find(self, sequence: Sequence) -> _Fetch | None:
        """Return what a fetch of a sequence would load, without ordering it; None if it brings nothing."""
        groups, size = self._groups, self._block_size
        has = [_Either(self._kv, group) for group in range(groups.num_groups)]
        hashes = sequence.hashes.one_by_one(sequence.token_ids, sequence.reusable)
        chain = longest_prefix(has, groups.windows, hashes, size)
        on_device = len(self._pool.match(chain)) // groups.num_groups
        states: list[_Part] = []
        kept: list[tuple[_Area, list[int]]] = []
        if self._states is not None and not self.loadable(sequence):  # a load brings the state
            on_device, _ = self._states.find(chain[:on_device])
            has_state = _Either(self._slots, 0)
            while chain and chain[-1] not in has_state:
                chain.pop()
            if chain:
                states = [self._part(self._slots, chain, 0, len(chain) - 1, kept)]
        if len(chain) <= on_device:
            return None
        kv = _Part(self._kv)
        for group, window in enumerate(groups.windows):
            part = self._part(self._kv, chain, group, first_seen(len(chain) * size, window, size), kept)
            kv.places += part.places
            kv.entries += part.entries
        blocks = len(kv.entries) + self._slot_blocks * sum(len(part.entries) for part in states)
        return _Fetch(sequence, (len(chain) - on_device) * size, blocks, [kv, *states], kept)

    def _part(
        self, area: _Area, chain: list[bytes], group: int, begin: int, kept: list[tuple[_Area, list[int]]]
    ) -> _Part:
        """Return what a group lacks on the device, of the blocks from ``begin`` on. Add the others to ``kept``."""
        part, cached, found = _Part(area), area.pool.cached(group), list[int]()
        for index in range(begin, len(chain)):
            block = cached.get(chain[index])
            if block is not None:
                found.append(block)
                continue
            entry = area.host.find((group, chain[index]))
            assert entry is not None
            part.places.append((index, group))
            part.entries.append(entry)
        kept.append((area, found))
        return part

    def _worthwhile(self, fetch: _Fetch) -> bool:
        """Whether a fetch, behind those in flight, probably takes less time than to compute its tokens.

        What is unknown, or has not been measured for long, is tried.
        """
        compute = self._meter.costs(LinearCost()).prompt.slope * fetch.num_tokens
        if not compute:
            return True
        before = sum(each.size for each in self._loads.values())
        seconds = self._cost.line.aged(self._clock() - self._measured_at).at(before + fetch.size)
        return seconds < compute

    def _take_blocks(self, fetch: _Fetch) -> bool:
        """Keep the cached blocks of a prefix, and take blocks for the others. Return False if too few are free."""
        for area, blocks in fetch.kept:
            area.pool.hold(blocks)
        for part in fetch.parts:
            spare = 1 + fetch.sequence.for_peer if part.area is not self._kv else 0  # what ``StateSlots`` will need
            pool, count = part.area.pool, len(part.entries)
            found = pool.take(count) if pool.count(Use.FREE) >= count + spare else None
            if found is None:
                self._give_back(fetch)
                return False
            part.blocks = found
        return True

    def _give_back(self, fetch: _Fetch) -> None:
        for part in fetch.parts:
            part.area.pool.drop(part.blocks, Use.HELD)
        self._drop_kept(fetch)

    def _order_load(self, fetch: _Fetch) -> None:
        kv, *states = fetch.parts
        for part in fetch.parts:
            for entry in part.entries:
                part.area.host.pin(entry)
        order = HostCopy(
            self._number(),
            load=True,
            blocks=tuple(kv.blocks),
            host_blocks=tuple(entry.block for entry in kv.entries),
            slots=tuple(slot for part in states for slot in part.blocks),
            host_slots=tuple(entry.block for part in states for entry in part.entries),
        )
        fetch.ordered_at, fetch.generation = self._clock(), self._generation
        self._loads[order.copy_id] = fetch
        self._copies.append(order)

    def _loaded(self, copy_id: int, result: CopyResult) -> None:
        """The copy of a fetch has ended: check its digests, if there are any."""
        fetch = self._loads[copy_id]
        self._totals.host_kv_load_bytes += result.num_bytes
        self._totals.host_kv_load_seconds += result.seconds
        if result.error:
            _log.warning("KV was not loaded from host memory: %s", result.error)
            self._end_load(copy_id, [False] * sum(len(part.entries) for part in fetch.parts))
        elif self._checksum:
            kv, *states = fetch.parts
            slots = tuple(slot for part in states for slot in part.blocks)
            groups = tuple(group for _, group in kv.places)
            self._order_digests(kv.blocks, groups, slots, partial(self._compare, copy_id))
        else:
            self._end_load(copy_id, [True] * sum(len(part.entries) for part in fetch.parts))

    def _compare(self, copy_id: int, found: tuple[int, ...]) -> None:
        pairs = [(part, entry) for part in self._loads[copy_id].parts for entry in part.entries]
        right = [entry.digest == digest for (_, entry), digest in zip(pairs, found, strict=True)]
        for (part, entry), is_right in zip(pairs, right, strict=True):
            if not is_right:
                part.area.host.retire(entry)
        if not all(right):
            num_corrupt = right.count(False)
            self._totals.host_kv_corrupt_blocks += num_corrupt
            _log.error(
                "%d of %d blocks in host memory have changed since they were stored: their tokens are computed again; "
                "if this repeats, test the memory of this host",
                num_corrupt,
                len(right),
            )
        self._end_load(copy_id, right)

    def _end_load(self, copy_id: int, right: list[bool]) -> None:
        """Let the prefix cache have the blocks that are right, and keep them for the sequence that waits."""
        fetch = self._loads.pop(copy_id)
        now = self._clock()
        self._cost.add(fetch.size, now - max(fetch.ordered_at, self._measured_at))
        self._measured_at = now
        valid = fetch.generation == self._generation
        outcome = iter(right)
        for part in fetch.parts:
            kept: list[int] = []
            for place, entry, block in zip(part.places, part.entries, part.blocks, strict=True):
                part.area.host.unpin(entry)
                if next(outcome) and valid:
                    self._cache(fetch.sequence, part.area, place, entry.key, block)
                kept.append(block)
            fetch.kept.append((part.area, kept))
        fetch.ended = True
        if fetch.awaited and fetch.pull is not None:
            self._end_pull(fetch.pull)
            fetch.awaited = False
        if all(right) and valid:
            self._totals.host_kv_hit_tokens += fetch.num_tokens
        if not fetch.awaited:
            self._drop_kept(fetch)

    def _cache(self, sequence: Sequence, area: _Area, place: tuple[int, int], key: BlockKey, block: int) -> None:
        index, group = place
        if area.pool.cache(key[1], block, group):
            area.pool.recorder.store(sequence, index, group)

    def _drop_kept(self, fetch: _Fetch) -> None:
        kept, fetch.kept = fetch.kept, []
        self._events.status_changed = True
        with self._quietly():
            for area, blocks in kept:
                area.pool.drop(blocks, Use.HELD)

    # ------------------------------------------------------------ pulls

    def lease_cached(self, message: LeaseCached) -> None:
        """Fetch what a peer pulls, unless that takes blocks that requests of this node may need soon, then lease it."""
        fetch = self._find(_sequence_of(message, self._block_size))
        fits = fetch is not None and 2 * fetch.size <= self._pool.count(Use.FREE)
        if fetch is None or not (fits and self._worthwhile(fetch) and self._take_blocks(fetch)):
            super().lease_cached(message)
            return
        fetch.pull = message
        self._pulls[message.rid] = fetch
        self._order_load(fetch)

    def free_lease(self, rid: int) -> None:
        if (fetch := self._pulls.pop(rid, None)) is not None:
            fetch.awaited = False
        super().free_lease(rid)

    def _end_pull(self, message: LeaseCached) -> None:
        del self._pulls[message.rid]
        super().lease_cached(message)

    # ------------------------------------------------------------ stores

    def _order_stores(self) -> None:
        for area in self._areas:
            while len(self._stores) < _STORES and (found := area.next_store()):
                host_blocks = area.host.take(len(found))
                keys, blocks = map(list, zip(*found[: len(host_blocks)], strict=True))
                self._order_store(_Store(area, keys, blocks, host_blocks, self._generation))

    def _order_store(self, store: _Store) -> None:
        area, copy_id = store.area, self._number()
        for key in store.keys:
            del area.waiting[key]
            area.storing.add(key)
        area.pool.lease(store.blocks)
        self._stores[copy_id] = store
        blocks, host_blocks = tuple(store.blocks), tuple(store.host_blocks)
        if area is self._kv:
            self._copies.append(HostCopy(copy_id, load=False, blocks=blocks, host_blocks=host_blocks))
        else:
            self._copies.append(HostCopy(copy_id, load=False, slots=blocks, host_slots=host_blocks))
        if not self._checksum:
            store.digests = (None,) * len(blocks)
        elif area is self._kv:
            groups = tuple(group for group, _ in store.keys)
            self._order_digests(store.blocks, groups, (), partial(self._digested, copy_id))
        else:
            self._order_digests([], (), blocks, partial(self._digested, copy_id))

    def _digested(self, copy_id: int, digests: tuple[int, ...]) -> None:
        self._stores[copy_id].digests = digests
        self._end_store(copy_id)

    def _stored(self, copy_id: int, result: CopyResult) -> None:
        self._stores[copy_id].result = result
        self._totals.host_kv_store_bytes += result.num_bytes
        self._end_store(copy_id)

    def _end_store(self, copy_id: int) -> None:
        """Let stored blocks be found, once they are copied and digested."""
        store = self._stores[copy_id]
        if store.digests is None or store.result is None:
            return
        del self._stores[copy_id]
        self._events.status_changed = True
        area, result = store.area, store.result
        area.storing.difference_update(store.keys)
        with self._quietly():
            area.pool.drop(store.blocks, Use.LEASED)
        if result.error:
            _log.warning("KV was not copied to host memory: %s", result.error)
        if result.error or store.generation != self._generation:
            area.host.give_back(store.host_blocks)
            return
        for key, block, digest in zip(store.keys, store.host_blocks, store.digests, strict=True):
            if area.host.add(key, block, digest) and area is self._kv and self._missing_on_device(key):
                self._changes.add(key[1])

    def _dropped(self, key: BlockKey) -> None:
        """A block of the KV cache has left host memory."""
        self._totals.host_kv_evicted_blocks += 1
        if self._missing_on_device(key):
            self._changes.remove(key[1])

    def _missing_on_device(self, key: BlockKey) -> bool:
        group, block_hash = key
        return not group and self._pool.find(block_hash) is None

    # ------------------------------------------------------------ orders and results

    @property
    def has_orders(self) -> bool:
        if self._copies or not self._allocated or super().has_orders:
            return True
        return len(self._stores) < _STORES and any(area.next_store() for area in self._areas)

    def take_orders(self) -> KVConnectorOrders:
        self._order_stores()
        orders = super().take_orders()
        if self._allocated and not self._copies:
            return orders
        copies, self._copies = tuple(self._copies), []
        orders = msgspec.structs.replace(orders, copies=copies, allocate_host_memory=not self._allocated)
        self._allocated = True
        return orders

    def update(self, output: ModelRunnerOutput) -> None:
        super().update(output)
        for room in output.connector.host_room:
            for area, count in zip(self._areas, (room.num_blocks, room.num_slots), strict=False):
                area.host.grow(count)
        for result in output.connector.copied:
            if result.copy_id in self._loads:
                self._loaded(result.copy_id, result)
            else:
                self._stored(result.copy_id, result)

    def take_events(self) -> tuple[list[bytes], list[bytes], list[CacheChanges]]:
        """A block counts as cached while it is on the device or in host memory."""
        _, _, changes = super().take_events()
        return *self._changes.take(), changes

    def _order_digests(
        self,
        blocks: list[int],
        groups: tuple[int, ...],
        slots: tuple[int, ...],
        take: Callable[[tuple[int, ...]], None],
    ) -> None:
        """Order digests of full blocks and of slots, beside steps."""
        several = groups if self._groups.num_groups > 1 else ()
        self._digests.add(tuple(blocks), several, self._block_size, take, slots)

    def _number(self) -> int:
        number = self._next_id
        self._next_id += 1
        return number

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Drop users of blocks that no sequence has used."""
        for watcher in self._watchers:
            watcher.quiet = True
        try:
            yield
        finally:
            for watcher in self._watchers:
                watcher.quiet = False
