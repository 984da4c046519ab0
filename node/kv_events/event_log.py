"""Numbers and encodes batches of KV events, keeps the latest ones, and knows what cache and tiers have. Pure."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from pdserve.ipc.cache_changes import BlockKey, CacheChanges, Medium, StoredBlock
from pdserve.kv.layout import KVLayout

#: Blocks of the prefix cache are in memory that attention reads: readers call it GPU, also where the device is a CPU.
DEVICE = "GPU"

_KEPT_BATCHES = 10_000
_KEPT_BYTES = 64 << 20
_BATCH_BYTES = 64 << 10  # most bytes of a batch, so that a bound on the number of batches bounds their bytes
_EVENT_BLOCKS = 64  # most blocks of an event, so that any event fits into a batch
_EVENT_TOKENS = 8192  # most tokens of an event, for the same reason
_MOST_BEHIND = 1 << 18  # most blocks on tiers only whose tokens are kept: some 400 bytes each

Batch = tuple[int, bytes]  # (number, payload)


class GroupKind(NamedTuple):
    """The kind of a KV cache group, by vLLM's names."""

    kind: str
    window: int | None


def group_kinds(layout: KVLayout, has_states: bool) -> list[GroupKind]:
    """Return the kinds of the KV cache groups; the last group holds snapshots, if layers have recurrent states."""
    full = layout.spec.event_kind
    kinds = [GroupKind("sliding_window" if window else full, window) for window in layout.groups.windows]
    return [*kinds, GroupKind("mamba", None)] if has_states else kinds


def short_hash(block_hash: bytes) -> int:
    """Return the number that names a block in events: the same 64 bits as in reports to routers of pdserve."""
    return int.from_bytes(block_hash[:8], "little")


class _Event:
    """Makes the events, as maps or arrays. Fields are in the order of vLLM's arrays."""

    def __init__(
        self, kinds: Sequence[GroupKind], block_size: int, as_maps: bool, name_of: Callable[[str], str]
    ) -> None:
        self._name_of = name_of
        self._kinds = kinds
        self._block_size = block_size
        self._as_maps = as_maps

    def cleared(self) -> Any:
        return self._event("AllBlocksCleared", {})

    def removed(self, group: int, block_hashes: list[int], medium: str) -> Any:
        return self._event("BlockRemoved", {"block_hashes": block_hashes, "medium": medium, "group_idx": group})

    def stored(self, blocks: Sequence[StoredBlock], medium: str = DEVICE) -> Any:
        """Consecutive blocks of one prompt and group."""
        first = blocks[0]
        tokens = array("I")
        for block in blocks:
            tokens.frombytes(block.token_ids)
        keys = [_extra_keys(block) for block in blocks]
        return self._stored(
            first.group,
            [short_hash(block.block_hash) for block in blocks],
            medium=medium,
            parent=short_hash(first.parent) if first.parent else None,
            tokens=tokens.tolist(),
            extra_keys=keys if any(keys) else None,
            lora_name=first.adapter and self._name_of(first.adapter),
        )

    def stored_in(self, medium: str, group: int, block_hashes: list[int]) -> Any:
        """Blocks of a tier behind the prefix cache. Readers know their tokens from an earlier event, or not at all."""
        return self._stored(group, block_hashes, medium=medium)

    def _stored(
        self,
        group: int,
        block_hashes: list[int],
        *,
        medium: str = DEVICE,
        parent: int | None = None,
        tokens: Sequence[int] = (),
        extra_keys: list[Any] | None = None,
        lora_name: str = "",
    ) -> Any:
        kind = self._kinds[group]
        fields = {
            "block_hashes": block_hashes,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": self._block_size,
            "lora_id": None,
            "medium": medium,
            "lora_name": lora_name or None,
            "extra_keys": extra_keys,
            "group_idx": group,
            "kv_cache_spec_kind": kind.kind,
            "kv_cache_spec_sliding_window": kind.window,
        }
        return self._event("BlockStored", fields)

    def _event(self, name: str, fields: Mapping[str, Any]) -> Any:
        return {"type": name, **fields} if self._as_maps else [name, *fields.values()]


def _extra_keys(block: StoredBlock) -> list[Any] | None:
    """Return what a block's hash has beside tokens: adapter, images, and the salt in the first block of a prompt."""
    adapter = [block.adapter] if block.adapter else []
    images = [[digest.hex(), offset] for digest, offset in block.images]
    salt = [block.cache_salt] if block.cache_salt and not block.parent else []
    return [*adapter, *images, *salt] or None


class EventLog:
    """The batches of one node.

    Readers are told of a block while its tokens are known: once per medium that has it, and once of its removal there.
    A block that a scan finds on disk is told when the device has had it. Blocks that only tiers have are removed for
    readers, the oldest first, if their tokens are too many to keep.

    Blocks are stored before others are removed. So a reader that forgets the tokens of a block with its last medium
    still has them when the block moves from one to the next.
    """

    def __init__(
        self,
        kinds: Sequence[GroupKind],
        block_size: int,
        as_maps: bool = True,
        kept_batches: int = _KEPT_BATCHES,
        kept_bytes: int = _KEPT_BYTES,
        most_behind: int = _MOST_BEHIND,
        name_of: Callable[[str], str] = str,
    ) -> None:
        """``name_of`` returns the name of an adapter by its digest."""
        self._event = _Event(kinds, block_size, as_maps, name_of)
        self._longest = max(1, min(_EVENT_BLOCKS, _EVENT_TOKENS // block_size))
        self._kept_batches = kept_batches
        self._kept_bytes = kept_bytes
        self._most_behind = most_behind
        self._encoder = msgspec.msgpack.Encoder()
        self._stored: dict[BlockKey, StoredBlock] = {}  # on the device, oldest first
        self._behind: dict[BlockKey, StoredBlock] = {}  # on tiers only, oldest first
        self._tiers: dict[Medium, dict[BlockKey, None]] = {medium: {} for medium in Medium}  # also unknown blocks
        self._kept: deque[bytes] = deque()
        self._num_bytes = 0  # bytes of the kept batches
        self._snapshot: Batch | None = None  # the latest one, if all batches after it are kept
        self.next_number = 0

    def add(self, changes: CacheChanges) -> list[Batch]:
        """Return the batches for these changes; none if readers need no event."""
        payloads = list(self._batches(self._events_of(changes)))
        batches = list(enumerate(payloads, self.next_number))
        self.next_number += len(payloads)
        self._kept += payloads
        self._num_bytes += sum(map(len, payloads))
        while len(self._kept) > self._kept_batches or self._num_bytes > self._kept_bytes:
            self._num_bytes -= len(self._kept.popleft())
        if self._snapshot is not None and self._snapshot[0] < self._oldest - 1:
            self._snapshot = None
        return batches

    def replay(self, first: int) -> Iterator[Batch]:
        """Yield the batches from ``first`` to the present, for a reader that has the earlier ones.

        The log may grow between two batches: a snapshot replaces batches that are no longer kept.
        """
        end = self.next_number
        wanted = first if first <= end else -1  # larger: a number of an earlier start of the node
        while end and wanted < end:
            batch = self._kept_or_snapshot(wanted)
            yield batch
            wanted = batch[0] + 1

    @property
    def _oldest(self) -> int:
        """The number of the first kept batch."""
        return self.next_number - len(self._kept)

    def _kept_or_snapshot(self, number: int) -> Batch:
        """Return a batch, or a snapshot that has it and is followed by kept batches only."""
        if number >= self._oldest:
            return number, self._kept[number - self._oldest]
        if self._snapshot is None:
            events = [msgspec.Raw(self._encoder.encode(event)) for event in self._present()]
            self._snapshot = self.next_number - 1, self._payload(events)
        return self._snapshot

    def _events_of(self, changes: CacheChanges) -> Iterator[Any]:
        """Apply changes, and yield the events for them."""
        if changes.cleared:
            self._clear()
            yield self._event.cleared()
        for blocks in self._chains(changes.stored):
            yield self._event.stored(blocks)
        for medium, keys in self._add(changes).items():
            yield from self._stored_in(medium, keys)
        yield from self._removed(DEVICE, changes.removed)
        for tier in changes.tiers:
            yield from self._removed(tier.medium, [key for key in tier.removed if self._is_known(key)])
        self._remove(changes)
        while len(self._behind) > self._most_behind:
            key = next(iter(self._behind))
            for where in self._media_of(key):
                yield from self._removed(where, [key])
            del self._behind[key]

    def _stored_in(self, medium: Medium, keys: Iterable[BlockKey]) -> Iterator[Any]:
        for group, block_hashes in _by_group(keys):
            yield self._event.stored_in(medium, group, block_hashes)

    def _removed(self, medium: str, keys: Iterable[BlockKey]) -> Iterator[Any]:
        for group, block_hashes in _by_group(keys):
            yield self._event.removed(group, block_hashes, medium)

    def _clear(self) -> None:
        self._stored.clear()
        self._behind.clear()
        for keys in self._tiers.values():
            keys.clear()

    def _add(self, changes: CacheChanges) -> dict[Medium, list[BlockKey]]:
        """Add stored blocks. Return the blocks to announce for each tier: new there, or with newly known tokens."""
        new = [block.key for block in changes.stored if block.key not in self._behind]
        told = {medium: [key for key in new if key in keys] for medium, keys in self._tiers.items()}
        for block in changes.stored:
            self._stored[block.key] = block
            self._behind.pop(block.key, None)
        for tier in changes.tiers:
            self._tiers[tier.medium].update(dict.fromkeys(tier.stored))
            told[tier.medium] += filter(self._is_known, tier.stored)
        return told

    def _remove(self, changes: CacheChanges) -> None:
        for tier in changes.tiers:
            for key in tier.removed:
                self._tiers[tier.medium].pop(key, None)
        for key in changes.removed:
            left = self._stored.pop(key, None)
            if left is not None and self._media_of(key):
                self._behind[key] = left
        for tier in changes.tiers:
            for key in tier.removed:
                if not self._media_of(key):
                    self._behind.pop(key, None)

    def _is_known(self, key: BlockKey) -> bool:
        """Whether readers know of a block: its tokens are known."""
        return key in self._stored or key in self._behind

    def _media_of(self, key: BlockKey) -> list[str]:
        """Return where a block is, the nearest first."""
        return [*[DEVICE] * (key in self._stored), *(medium for medium, keys in self._tiers.items() if key in keys)]

    def _present(self) -> Iterator[Any]:
        """Yield the events that tell a new reader all. A block's tokens are in the event of its nearest medium."""
        yield self._event.cleared()
        blocks = _parents_first({**self._behind, **self._stored})
        for nearest, there in groupby(blocks, lambda block: self._media_of(block.key)[0]):
            for chain in self._chains(there):
                yield self._event.stored(chain, nearest)
        for medium, keys in self._tiers.items():
            untold = [key for key in keys if self._is_known(key) and self._media_of(key)[0] != medium]
            yield from self._stored_in(medium, untold)

    def _chains(self, blocks: Iterable[StoredBlock]) -> Iterator[list[StoredBlock]]:
        """Join blocks that follow each other in one prompt and group."""
        chain: list[StoredBlock] = []
        for block in blocks:
            follows = chain and (block.group, block.parent) == chain[-1].key
            if chain and (not follows or len(chain) == self._longest):
                yield chain
                chain = []
            chain.append(block)
        if chain:
            yield chain

    def _batches(self, events: Iterable[Any]) -> Iterator[bytes]:
        """Encode events one by one, so that a large batch does not keep other threads from running."""
        batch: list[msgspec.Raw] = []
        num_bytes = 0
        for event in events:
            encoded = self._encoder.encode(event)
            num_bytes += len(encoded)
            if batch and num_bytes > _BATCH_BYTES:
                yield self._payload(batch)
                batch = []
                num_bytes = len(encoded)
            batch.append(msgspec.Raw(encoded))
        if batch:
            yield self._payload(batch)

    def _payload(self, events: list[msgspec.Raw]) -> bytes:
        return self._encoder.encode([time.time(), events, None])


def _by_group(keys: Iterable[BlockKey]) -> Iterator[tuple[int, list[int]]]:
    """Yield each KV cache group with the numbers of its blocks, as many as an event has."""
    groups: dict[int, list[int]] = {}
    for group, block_hash in keys:
        numbers = groups.setdefault(group, [])
        numbers.append(short_hash(block_hash))
        if len(numbers) == _EVENT_BLOCKS:
            yield group, groups.pop(group)
    yield from groups.items()


def _parents_first(stored: Mapping[BlockKey, StoredBlock]) -> Iterator[StoredBlock]:
    """Yield each block after the block before it, which may have been stored anew later."""
    done: set[BlockKey] = set()
    for block in stored.values():
        missing: list[StoredBlock] = []
        ancestor: StoredBlock | None = block
        while ancestor is not None and ancestor.key not in done:
            done.add(ancestor.key)
            missing.append(ancestor)
            ancestor = stored.get((ancestor.group, ancestor.parent))
        yield from reversed(missing)
