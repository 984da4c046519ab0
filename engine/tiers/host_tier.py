"""Host memory behind the prefix cache: cached blocks are copied there, and come back before a prompt needs them.

    device   computed ──► cached ─────────► evicted             fetched ──► cached again ──► held by its sequence
                             └─ store ─┐                    ┌─ load ─┘
    host                               └──► stored ─────────┘

Stores are written through: a block is copied soon after it has entered the prefix cache, in small batches beside steps,
so its eviction costs nothing. A block that a store reads has a lease, so nothing overwrites it.

A fetch fills blocks of its own, which nothing else uses before the copy has ended and, with checksums, its digests are
those of the stored blocks. Then they enter the prefix cache. Sequences find them only there: a request that is
cancelled, preempted or moved meanwhile needs no special case. Until its sequence is admitted, the tier holds all blocks
of the prefix for it, unless other sequences lack blocks.

A recurrent state is a block of another kind: it is stored with its own pool, and fetched with the KV before it.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count

from engine.kv_cache.block_pool import Use
from engine.kv_cache.cache_parts import CacheParts
from engine.kv_cache.digest_orders import TakeDigests
from engine.kv_cache.tiers import Tiers
from engine.request import Request
from engine.sequence import Sequence
from engine.step_cost_meter import LineFit
from engine.tiers.areas import Area, Areas, AreaWatcher
from engine.tiers.host_fetch import Fetch, Part
from engine.tiers.host_pool import HostEntry, HostPool, HostWatcher
from engine.tiers.host_stores import HostStores
from engine.tiers.source import Source
from pdserve.hashing import BlockHashes, root_hash
from pdserve.ipc.cache_changes import BlockKey, Medium
from pdserve.ipc.key_changes import KeyChanges
from pdserve.ipc.messages import Fetched, LeaseCached, Mode, Totals
from pdserve.kv.host_copies import CopyResult, HostCopy, HostRoom
from pdserve.records import NO_ORDERS, KVConnectorOrders, ModelRunnerOutput
from pdserve.request_cost import LinearCost
from pdserve.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

_KEEP = 0.95  # weight of earlier fetches after each new one: about 20 count


def _sequence_of(message: LeaseCached, block_size: int) -> Sequence:
    """Return a sequence that can use all cached blocks that a peer pulls. It is in no queue."""
    token_ids = array("I", message.token_ids)
    token_ids.append(0)  # the KV of a last token never comes from the cache
    sampling = SamplingParams(max_tokens=1)
    length = len(token_ids)
    request = Request(message.rid, token_ids.tobytes(), sampling, Mode.LOCAL, message.cache_salt)
    hashes = BlockHashes(block_size, root_hash(message.cache_salt, message.adapter), images=message.images)
    return Sequence(0, request, 0, token_ids, hashes, length, length + 1)


class _Presence(HostWatcher):
    """Tells routers which blocks host memory has and the device lacks. Counts blocks that leave."""

    def __init__(self, area: Area, totals: Totals, changes: KeyChanges[bytes]) -> None:
        self._area = area
        self._totals = totals
        self._changes = changes

    def added(self, entry: HostEntry) -> None:
        if self._nowhere_else(entry):
            self._changes.add(entry.key[1])

    def dropped(self, entry: HostEntry) -> None:
        self._totals.host_kv_evicted_blocks += 1
        if self._nowhere_else(entry):
            self._changes.remove(entry.key[1])

    def _nowhere_else(self, entry: HostEntry) -> bool:
        group, block_hash = entry.key
        return not group and self._area.pool.find(block_hash) is None and entry.key not in self._area.below


class _Recorded(HostWatcher):
    """Records for KV events what host memory has."""

    def __init__(self, area: Area) -> None:
        self._area = area

    def added(self, entry: HostEntry) -> None:
        self._area.pool.recorder.tier_changed(Medium.HOST, entry.key, added=True)

    def dropped(self, entry: HostEntry) -> None:
        self._area.pool.recorder.tier_changed(Medium.HOST, entry.key, added=False)


class HostTier(Tiers):
    """Host memory of a node."""

    def __init__(
        self,
        parts: CacheParts,
        room: HostRoom,
        *,
        checksum: bool,
        store_blocks: int,
        slot_blocks: float = 0.0,
    ) -> None:
        """``room``: blocks and slots, once all memory is allocated. A store has up to ``store_blocks`` blocks.

        ``slot_blocks``: bytes of a slot of recurrent state, in blocks.
        """
        self._pool = parts.pool
        self._events = parts.events
        self._block_size = parts.block_size
        self._states = parts.states
        self._groups = parts.pool.groups
        self._digests = parts.digests
        self._meter = parts.meter
        self._totals = parts.totals
        self._clock = parts.clock
        self.source = Source()
        self._checksum = checksum
        self._slot_blocks = slot_blocks
        self._changes = KeyChanges[bytes]()  # changes of the first group's blocks over all tiers
        parts.report.anywhere = self._changes
        most = max(1, self._pool.total // 4)
        kv = Area(self._pool, HostPool(room.num_blocks), min(store_blocks, most))
        kv.host.watchers.append(_Presence(kv, self._totals, self._changes))
        self._watchers = [AreaWatcher(kv, self._groups.windows, self._totals, self._changes)]
        slots = None
        if self._states.recurrent:
            per_store = max(1, int(store_blocks / max(slot_blocks, 1.0)))
            slots = Area(self._states.pool, HostPool(room.num_slots), per_store)
            self._watchers.append(AreaWatcher(slots, (None,), self._totals))
        self.areas = Areas(kv, slots, self._groups, self._block_size)
        for area, watcher in zip(self.areas, self._watchers, strict=True):
            area.pool.watcher = watcher
            area.host.watchers.append(_Recorded(area))
        self._cost = LineFit(_KEEP)  # seconds of a fetch, by blocks
        self._measured_at = 0.0
        self._allocated = False  # ordered
        self._copies: list[HostCopy] = []
        self._numbers = count(1)  # ids of copies
        self._stores = HostStores(self.areas, self._numbers, self._order_digests if checksum else None, self._quietly)
        self._loads: dict[int, Fetch] = {}  # by number of the copy
        self._fetches: dict[int, Fetch] = {}  # by sequence that waits
        self._considered: set[int] = set()  # sequences
        self._pulls: dict[int, Fetch] = {}  # by rid
        self._generation = 0  # counts changes of the weights

    # ------------------------------------------------------------ fetches

    @property
    def fetches(self) -> bool:
        return True

    def considered(self, sequence: Sequence) -> bool:
        if self.source.reading(sequence):
            return True
        return self.source.considered(sequence) and sequence.seq in self._considered

    def fetching(self, sequence: Sequence) -> bool:
        return self.source.reading(sequence) or self._awaits_copy(sequence)

    def fetch(self, sequence: Sequence) -> bool:
        if self.source.read(sequence):
            return True
        if sequence.seq not in self._considered:
            self._considered.add(sequence.seq)
            self._begin_fetch(sequence)
        self.source.let_go(sequence)
        return self._awaits_copy(sequence)

    def _begin_fetch(self, sequence: Sequence) -> None:
        fetch = self._find(sequence)
        if fetch is not None and self._worthwhile(fetch) and self._take_blocks(fetch):
            self._fetches[sequence.seq] = fetch
            self._order_load(fetch)

    def _awaits_copy(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence waits for a copy to the device."""
        fetch = self._fetches.get(sequence.seq)
        return fetch is not None and not fetch.ended

    def end_fetch(self, sequence: Sequence) -> None:
        self.source.end(sequence)
        self._considered.discard(sequence.seq)
        fetch = self._fetches.pop(sequence.seq, None)
        if fetch is not None:
            fetch.awaited = False
            if fetch.ended:
                self._drop_kept(fetch)

    def give_way(self) -> bool:
        kept = [fetch for fetch in self._fetches.values() if fetch.ended and fetch.kept]
        for fetch in kept:
            self._drop_kept(fetch)
        return bool(kept)

    @property
    def copying(self) -> bool:
        return bool(self._loads) or self._stores.any_unheld

    def forget(self) -> None:
        self.source.forget()
        self._generation += 1
        self._stores.forget()
        for area in self.areas:
            area.waiting.clear()
            area.host.clear()

    def use_weights(self, version: str) -> None:
        self.source.use_weights(version)

    def below_changed(self, key: BlockKey, added: bool) -> None:
        """Note that a tier behind host memory has gained or lost a block of the KV cache."""
        group, block_hash = key
        if not group and key not in self.areas.kv.host and self._pool.find(block_hash) is None:
            (self._changes.add if added else self._changes.remove)(block_hash)

    @property
    def host_blocks(self) -> tuple[int, int]:
        host = self.areas.kv.host
        return host.num_free, host.num_stored

    @property
    def disk_blocks(self) -> int:
        return self.source.num_blocks

    def _find(self, sequence: Sequence) -> Fetch | None:
        """Return what a fetch of a sequence would load, without ordering it; None if it brings nothing."""
        with_state = not sequence.request.mode.loads  # a load brings the state
        hashes = sequence.hashes.one_by_one(sequence.token_ids, sequence.reusable)
        chain = self.areas.longest(hashes, with_state)
        on_device = len(self._pool.match(chain)) // self._groups.num_groups
        if with_state:
            on_device, _ = self._states.find(chain[:on_device])
        if len(chain) <= on_device:
            return None
        slots = None if self.areas.slots is None else Part(self.areas.slots)
        fetch = Fetch(sequence, (len(chain) - on_device) * self._block_size, Part(self.areas.kv), slots)
        parts = {part.area: part for part in fetch.parts}
        kept: dict[Area, list[int]] = {part.area: [] for part in fetch.parts}
        for area, group, index in self.areas.places(chain, with_state):
            block = area.pool.cached(group).get(chain[index])
            if block is not None:
                kept[area].append(block)
                continue
            entry = area.host.find((group, chain[index]))
            assert entry is not None
            parts[area].add(index, group, entry)
            fetch.size += 1.0 if area is self.areas.kv else self._slot_blocks
        fetch.kept = [*kept.items()]
        return fetch

    def _worthwhile(self, fetch: Fetch) -> bool:
        """Whether a fetch, behind fetches in flight, probably takes less time than computing its tokens.

        A fetch is tried if its time is unknown, or was not measured for long.
        """
        compute = self.seconds_to_compute(fetch.num_tokens)
        return not compute or self.seconds_to_fetch(fetch.size) < compute

    def seconds_to_compute(self, num_tokens: int) -> float:
        """Return the predicted time to compute tokens of a prompt; 0: unknown."""
        return self._meter.costs(LinearCost()).prompt.slope * num_tokens

    def seconds_to_fetch(self, num_blocks: float) -> float:
        """Return the predicted time to copy blocks to the device, behind fetches in flight; 0: unknown."""
        line = self._cost.line.aged(self._clock() - self._measured_at)
        blocks_ahead = sum(load.size for load in self._loads.values())
        return line.at(blocks_ahead + num_blocks)

    def _take_blocks(self, fetch: Fetch) -> bool:
        """Keep the cached blocks of a prefix, and take blocks for the others. Return False if too few are free."""
        for area, blocks in fetch.kept:
            area.pool.hold(blocks)
        for part in fetch.parts:
            spare = 1 + fetch.sequence.for_peer if part is fetch.slots else 0  # what ``StateSlots`` will need
            pool = part.area.pool
            count = len(part.entries)
            taken = pool.take(count) if pool.count(Use.FREE) >= count + spare else None
            if taken is None:
                self._give_back(fetch)
                return False
            part.blocks = taken
        return True

    def _give_back(self, fetch: Fetch) -> None:
        for part in fetch.parts:
            part.area.pool.drop(part.blocks, Use.HELD)
        self._drop_kept(fetch)

    def _order_load(self, fetch: Fetch) -> None:
        for area, entry in fetch.entries():
            area.host.pin(entry)
        copy_id = next(self._numbers)
        fetch.compute = self.seconds_to_compute(fetch.num_tokens)
        fetch.expected = self.seconds_to_fetch(fetch.size)
        if fetch.compute and fetch.expected:
            self._totals.host_kv_expected_saved_seconds += max(0.0, fetch.compute - fetch.expected)
        fetch.ordered_at = self._clock()
        fetch.generation = self._generation
        self._loads[copy_id] = fetch
        self._copies.append(fetch.copy(copy_id))

    def _loaded(self, result: CopyResult) -> None:
        """End the copy of a fetch: check its digests, if there are any."""
        copy_id = result.copy_id
        fetch = self._loads[copy_id]
        self._totals.host_kv_load_bytes += result.num_bytes
        self._totals.host_kv_load_seconds += result.seconds
        if result.error:
            _log.warning("KV was not loaded from host memory: %s", result.error)
            self._end_load(copy_id, [False] * fetch.num_entries)
        elif self._checksum:
            groups = tuple(group for _, group in fetch.kv.places)
            slots = () if fetch.slots is None else tuple(fetch.slots.blocks)
            self._add_digests(fetch.kv.blocks, groups, slots, partial(self._compare, copy_id))
        else:
            self._end_load(copy_id, [True] * fetch.num_entries)

    def _compare(self, copy_id: int, digests: tuple[int, ...]) -> None:
        fetch = self._loads[copy_id]
        fetch.tokens_from_disk = fetch.num_unverified * self._block_size
        entries = list(fetch.entries())
        right = [entry.digest == digest for (_, entry), digest in zip(entries, digests, strict=True)]
        wrong = [entry for (_, entry), is_right in zip(entries, right, strict=True) if not is_right]
        in_memory = sum(entry.verified for entry in wrong)
        self._totals.host_kv_corrupt_blocks += in_memory
        self._totals.disk_kv_corrupt_blocks += len(wrong) - in_memory
        for (area, entry), is_right in zip(entries, right, strict=True):
            area.host.compared(entry, is_right)
        if wrong:
            _log.error(
                "KV: %d blocks in host memory and %d from disk have changed since they were stored: their tokens are "
                "computed again; if this repeats, test the memory and the disk of this host",
                in_memory,
                len(wrong) - in_memory,
            )
        self._end_load(copy_id, right)

    def _end_load(self, copy_id: int, right: list[bool]) -> None:
        """Let the prefix cache have the blocks that are right, and keep them for the sequence that waits."""
        fetch = self._loads.pop(copy_id)
        now = self._clock()
        self._cost.add(fetch.size, now - max(fetch.ordered_at, self._measured_at))
        self._measured_at = now
        valid = fetch.generation == self._generation
        if fetch.awaited:
            self._report(fetch, now - fetch.ordered_at, succeeded=all(right) and valid)
        outcome = iter(right)
        for part in fetch.parts:
            for place, entry, block in zip(part.places, part.entries, part.blocks, strict=True):
                part.area.host.unpin(entry)
                if next(outcome) and valid:
                    self._cache(fetch.sequence, part.area, place, entry.key, block)
            fetch.kept.append((part.area, part.blocks))
        fetch.ended = True
        if fetch.awaited and fetch.answer is not None:
            del self._pulls[fetch.sequence.rid]
            fetch.answer()
            fetch.awaited = False
        if all(right) and valid:
            self._totals.host_kv_hit_tokens += fetch.num_tokens
            self._totals.disk_kv_hit_tokens += fetch.tokens_from_disk
        if not fetch.awaited:
            self._drop_kept(fetch)

    def _report(self, fetch: Fetch, seconds: float, *, succeeded: bool) -> None:
        """Report a fetch, and count the time that it has saved, or lost."""
        rid = fetch.sequence.rid
        num_tokens = fetch.num_tokens if succeeded else 0
        self._events.fetched.append(Fetched(rid, Medium.HOST, num_tokens, seconds, fetch.expected, fetch.compute))
        if fetch.compute:
            saved = fetch.compute * succeeded - seconds
            self._totals.host_kv_saved_seconds += max(0.0, saved)
            self._totals.host_kv_lost_seconds += max(0.0, -saved)

    def _cache(self, sequence: Sequence, area: Area, place: tuple[int, int], key: BlockKey, block: int) -> None:
        index, group = place
        if area.pool.cache((key[1],), (block,), group):
            area.pool.recorder.store(sequence, index, group)

    def _drop_kept(self, fetch: Fetch) -> None:
        kept = fetch.kept
        fetch.kept = []
        self._events.status_changed = True
        with self._quietly():
            for area, blocks in kept:
                area.pool.drop(blocks, Use.HELD)

    # ------------------------------------------------------------ pulls

    def fetch_for_peer(self, message: LeaseCached, answer: Callable[[], None]) -> bool:
        """Requests of this node may need blocks soon: fetch nothing that takes more than half of the free ones."""
        fetch = self._find(_sequence_of(message, self._block_size))
        fits = fetch is not None and 2 * fetch.size <= self._pool.count(Use.FREE)
        if fetch is None or not (fits and self._worthwhile(fetch) and self._take_blocks(fetch)):
            return False
        fetch.answer = answer
        self._pulls[message.rid] = fetch
        self._order_load(fetch)
        return True

    def end_pull(self, rid: int) -> None:
        if (fetch := self._pulls.pop(rid, None)) is not None:
            fetch.awaited = False

    # ------------------------------------------------------------ orders and results

    @property
    def has_orders(self) -> bool:
        return bool(self._copies) or not self._allocated or self.source.has_orders or self._stores.due

    def take_orders(self) -> KVConnectorOrders:
        self._copies += self._stores.order()
        disk = self.source.take_orders()
        if self._allocated and not (self._copies or disk):
            return NO_ORDERS
        copies = tuple(self._copies)
        self._copies = []
        allocate = not self._allocated
        self._allocated = True
        return KVConnectorOrders(copies=copies, allocate_host_memory=allocate, disk=disk)

    def update(self, output: ModelRunnerOutput) -> None:
        for room in output.connector.host_room:
            for area, num_items in zip(self.areas, (room.num_blocks, room.num_slots), strict=False):
                area.host.grow(num_items)
        for result in output.connector.copied:
            if result.copy_id in self._loads:
                self._loaded(result)
            else:
                self._totals.host_kv_store_bytes += result.num_bytes
                self._events.status_changed = True
                self._stores.copied(result)
        self.source.update(output)

    def _order_digests(self, area: Area, blocks: list[int], groups: tuple[int, ...], take: TakeDigests) -> None:
        """Order digests of full blocks, or of slots."""
        if area is self.areas.kv:
            self._add_digests(blocks, groups, (), take)
        else:
            self._add_digests([], (), tuple(blocks), take)

    def _add_digests(
        self, blocks: list[int], groups: tuple[int, ...], slots: tuple[int, ...], take: TakeDigests
    ) -> None:
        """Order digests of full blocks and of slots, beside steps."""
        several = groups if self._groups.num_groups > 1 else ()
        self._digests.add(tuple(blocks), several, self._block_size, take, slots)

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Drop users of blocks that no sequence has used."""
        with ExitStack() as stack:
            for watcher in self._watchers:
                stack.enter_context(watcher.quietly())
            yield
