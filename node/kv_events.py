"""Publishes changes of the prefix cache over ZeroMQ, in the form of vLLM's KV events: for routers of other projects.

    engine ──Batch.cache_changes──► event loop ──deque──► thread ─┬─ PUB     topic, sequence number, payload
                                                                  └─ ROUTER  replays of what a subscriber has missed

The payload is msgpack: ``[timestamp, events, data_parallel_rank]``. Sequence numbers (8 bytes, big-endian) count from 0
at the start of the node. A request for a replay is the first wanted number; the answers are (number, payload) of each
kept batch from there on, then number -1. If a wanted batch is no longer kept, the answer is one batch with the latest
number instead: the cache is cleared, then has all that it has now. So a replay is always exact, and memory is bounded.

docs/cluster.md describes it for readers.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
import zmq

from node.frontend_flags import KVEventOptions
from pdserve.errors import CapacityError, ConfigError
from pdserve.ipc.cache_changes import BlockKey, CacheChanges, Medium, StoredBlock
from pdserve.kv import KVLayout, LatentSpec
from pdserve.process import log_failure

_log = logging.getLogger(__name__)

#: Blocks of the prefix cache are in memory that attention reads: readers call it GPU, also where the device is a CPU.
DEVICE = "GPU"

_KEPT_BATCHES = 10_000
_KEPT_BYTES = 64 << 20
_UNSENT_BATCHES = 1_000  # per subscriber; further ones are lost to it until it asks for a replay
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_LONGEST_EVENT = 64  # blocks
_MOST_BEHIND = 1 << 18  # blocks that only tiers have, of which tokens are kept: some 400 bytes each


class GroupKind(NamedTuple):
    """The kind of a KV cache group, by vLLM's names."""

    kind: str
    window: int | None


def group_kinds(layout: KVLayout, has_states: bool) -> list[GroupKind]:
    """Return the kinds of the KV cache groups; the last group is that of snapshots, if layers have recurrent states."""
    full = "mla_attention" if isinstance(layout.spec, LatentSpec) else "full_attention"
    kinds = [GroupKind("sliding_window" if window else full, window) for window in layout.groups.windows]
    return [*kinds, GroupKind("mamba", None)] if has_states else kinds


def short_hash(block_hash: bytes) -> int:
    """Return the number that names a block in events: the same 64 bits as in reports to routers of pdserve."""
    return int.from_bytes(block_hash[:8], "little")


class _Event:
    """The events, as maps or arrays. The order of fields is that of vLLM's arrays."""

    def __init__(self, kinds: Sequence[GroupKind], block_size: int, as_maps: bool) -> None:
        self._kinds = kinds
        self._block_size = block_size
        self._as_maps = as_maps

    def cleared(self) -> Any:
        return self._event("AllBlocksCleared", {})

    def removed(self, group: int, block_hashes: list[int], medium: str) -> Any:
        return self._event("BlockRemoved", {"block_hashes": block_hashes, "medium": medium, "group_idx": group})

    def stored(self, blocks: Sequence[StoredBlock], medium: str = DEVICE) -> Any:
        """Consecutive blocks of one prompt and group. A salt is a key of its first block, as later ones follow it."""
        first, tokens = blocks[0], array("I")
        for block in blocks:
            tokens.frombytes(block.token_ids)
        salted = first.cache_salt and not first.parent
        return self._stored(
            first.group,
            [short_hash(block.block_hash) for block in blocks],
            medium=medium,
            parent=short_hash(first.parent) if first.parent else None,
            tokens=tokens.tolist(),
            extra_keys=[[first.cache_salt], *[None] * (len(blocks) - 1)] if salted else None,
        )

    def stored_in(self, medium: str, group: int, block_hashes: list[int]) -> Any:
        """Blocks of a tier behind the prefix cache. Readers know their tokens from an event before, or not at all."""
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
    ) -> Any:
        kind = self._kinds[group]
        fields = {
            "block_hashes": block_hashes,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": self._block_size,
            "lora_id": None,
            "medium": medium,
            "lora_name": None,
            "extra_keys": extra_keys,
            "group_idx": group,
            "kv_cache_spec_kind": kind.kind,
            "kv_cache_spec_sliding_window": kind.window,
        }
        return self._event("BlockStored", fields)

    def _event(self, name: str, fields: Mapping[str, Any]) -> Any:
        return {"type": name, **fields} if self._as_maps else [name, *fields.values()]


class EventLog:
    """Numbers and encodes batches of events, keeps the latest ones, and knows what the cache and its tiers have. Pure.

    Within a batch, blocks are stored before others are removed: so a reader that forgets the tokens of a block with its
    last medium still has them when the block moves from one to the next.
    """

    def __init__(
        self,
        kinds: Sequence[GroupKind],
        block_size: int,
        as_maps: bool = True,
        kept_batches: int = _KEPT_BATCHES,
        kept_bytes: int = _KEPT_BYTES,
    ) -> None:
        self._event = _Event(kinds, block_size, as_maps)
        self._kept_batches = kept_batches
        self._kept_bytes = kept_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._stored: dict[BlockKey, StoredBlock] = {}  # oldest first
        self._behind: dict[BlockKey, StoredBlock] = {}  # likewise, of tiers only
        self._tiers: dict[Medium, dict[BlockKey, None]] = {medium: {} for medium in Medium}
        self._kept: deque[bytes] = deque()
        self._num_bytes = 0  # of the kept batches
        self.next_number = 0

    def add(self, changes: CacheChanges) -> tuple[int, bytes]:
        """Return the number and the payload of the batch."""
        number = self.next_number
        payload = self._encode(self._events_of(changes))
        self._apply(changes)
        self.next_number += 1
        self._kept.append(payload)
        self._num_bytes += len(payload)
        while len(self._kept) > self._kept_batches or self._num_bytes > self._kept_bytes:
            self._num_bytes -= len(self._kept.popleft())
        return number, payload

    def replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Yield the numbers and payloads that lead a reader that has the batches before ``first`` to the present."""
        if not self.next_number:
            return
        oldest = self.next_number - len(self._kept)
        if not oldest <= first <= self.next_number:  # larger: a number of an earlier start of the node
            yield self.next_number - 1, self._snapshot()
            return
        for number in range(first, self.next_number):
            yield number, self._kept[number - oldest]

    def _events_of(self, changes: CacheChanges) -> Iterator[Any]:
        if changes.cleared:
            yield self._event.cleared()
        for blocks in _chains(changes.stored):
            yield self._event.stored(blocks)
        for medium, keys in self._untold(changes).items():
            yield from self._stored_in(medium, keys)
        for tier in changes.tiers:
            yield from self._stored_in(tier.medium, tier.stored)
        for group, block_hashes in _by_group(changes.removed):
            yield self._event.removed(group, block_hashes, DEVICE)
        for tier in changes.tiers:
            for group, block_hashes in _by_group(tier.removed):
                yield self._event.removed(group, block_hashes, tier.medium)

    def _stored_in(self, medium: Medium, keys: Iterable[BlockKey]) -> Iterator[Any]:
        for group, block_hashes in _by_group(keys):
            yield self._event.stored_in(medium, group, block_hashes)

    def _untold(self, changes: CacheChanges) -> dict[Medium, list[BlockKey]]:
        """Return the blocks of tiers whose tokens readers learn only now: they were found on disk."""
        new = [] if changes.cleared else [block.key for block in changes.stored if block.key not in self._behind]
        return {medium: [key for key in new if key in keys] for medium, keys in self._tiers.items()}

    def _apply(self, changes: CacheChanges) -> None:
        if changes.cleared:
            self._stored.clear()
            self._behind.clear()
            for keys in self._tiers.values():
                keys.clear()
        for block in changes.stored:
            self._stored[block.key] = block
            self._behind.pop(block.key, None)
        for tier in changes.tiers:
            keys = self._tiers[tier.medium]
            for key in tier.removed:
                keys.pop(key, None)
            keys.update(dict.fromkeys(tier.stored))
        for key in changes.removed:
            left = self._stored.pop(key, None)
            if left is not None and self._media_of(key) and len(self._behind) < _MOST_BEHIND:
                self._behind[key] = left
        for tier in changes.tiers:
            for key in tier.removed:
                if not self._media_of(key):
                    self._behind.pop(key, None)

    def _media_of(self, key: BlockKey) -> list[str]:
        """Return where a block is, the nearest first."""
        return [*[DEVICE] * (key in self._stored), *(medium for medium, keys in self._tiers.items() if key in keys)]

    def _snapshot(self) -> bytes:
        return self._encode(self._present())

    def _present(self) -> Iterator[Any]:
        """Yield the events that tell a new reader all. That of a block's nearest medium has its tokens, if known."""
        yield self._event.cleared()
        blocks = _parents_first({**self._behind, **self._stored})
        for nearest, there in groupby(blocks, lambda block: self._media_of(block.key)[0]):
            for chain in _chains(there):
                yield self._event.stored(chain, nearest)
        for medium, keys in self._tiers.items():
            untold = [key for key in keys if key not in self._behind or self._media_of(key)[0] != medium]
            yield from self._stored_in(medium, untold)

    def _encode(self, events: Iterable[Any]) -> bytes:
        """Encode events one by one, so that a large batch does not keep other threads from running."""
        encoded = [msgspec.Raw(self._encoder.encode(event)) for event in events]
        return self._encoder.encode([time.time(), encoded, None])


def _by_group(keys: Iterable[BlockKey]) -> Iterator[tuple[int, list[int]]]:
    """Yield each KV cache group with the numbers of its blocks, as many as an event has."""
    groups: dict[int, list[int]] = {}
    for group, block_hash in keys:
        numbers = groups.setdefault(group, [])
        numbers.append(short_hash(block_hash))
        if len(numbers) == _LONGEST_EVENT:
            yield group, groups.pop(group)
    yield from groups.items()


def _chains(blocks: Iterable[StoredBlock]) -> Iterator[list[StoredBlock]]:
    """Join blocks that follow each other in one prompt and group."""
    chain: list[StoredBlock] = []
    for block in blocks:
        follows = chain and (block.group, block.parent) == chain[-1].key
        if chain and (not follows or len(chain) == _LONGEST_EVENT):
            yield chain
            chain = []
        chain.append(block)
    if chain:
        yield chain


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


class KVEventPublisher:
    """Owns the sockets. ``publish`` and ``clear`` return at once; a thread encodes and sends."""

    def __init__(self, options: KVEventOptions, kinds: Sequence[GroupKind], block_size: int) -> None:
        """Bind the sockets, before a model loads. Raises CapacityError for a port in use, ConfigError otherwise."""
        self._topic = options.topic.encode()
        self._event_log = EventLog(kinds, block_size, options.as_maps)
        self._changes: deque[CacheChanges] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ended = self._failed = False
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._publisher = self._bind(zmq.PUB, options.endpoint, "--kv-events-endpoint", _UNSENT_BATCHES)
            self._replays = None
            if options.replay_endpoint:
                flag, unsent = "--kv-events-replay-endpoint", _KEPT_BATCHES + 1
                self._replays = self._bind(zmq.ROUTER, options.replay_endpoint, flag, unsent)
                self._replays.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue is an error, not a loss
        except BaseException:
            self._close_sockets()
            raise
        self.endpoints = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in self._sockets]
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)

    @property
    def num_batches(self) -> int:
        """Batches published since the start."""
        return self._event_log.next_number

    def start(self) -> None:
        self._thread.start()
        _log.info("KV events at %s with topic %s", " and ".join(self.endpoints), self._topic.decode())

    def publish(self, changes: CacheChanges) -> None:
        if not self._failed:
            self._changes.append(changes)
            os.eventfd_write(self._wake_fd, 1)

    def clear(self) -> None:
        """The engine starts or has ended, so its prefix cache is empty."""
        self.publish(CacheChanges(cleared=True, removed=[], stored=[]))

    def close(self) -> None:
        """Send what is left, and close the sockets. Idempotent."""
        if self._ended:
            return
        self._ended = True
        if self._thread.is_alive():
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join()
        self._close_sockets()
        os.close(self._wake_fd)

    def _bind(self, kind: int, endpoint: str, flag: str, unsent: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.SNDHWM, unsent)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as exc:
            if exc.errno == errno.EADDRINUSE:
                raise CapacityError(f"{flag} {endpoint}: the port is in use; choose another one") from exc
            text = f"{flag} {endpoint!r}: {exc.strerror}; write tcp://*:PORT, tcp://ADDRESS:PORT or ipc:///PATH"
            raise ConfigError(text) from exc
        return socket

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as exc:
            self._failed = True
            log_failure(_log, exc)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._replays is not None:
            poller.register(self._replays, zmq.POLLIN)
        while not self._ended:
            ready = dict(poller.poll())
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            while self._changes:
                number, payload = self._event_log.add(self._changes.popleft())
                self._publisher.send_multipart([self._topic, _number(number), payload])  # a PUB socket never blocks
            if self._replays is not None and self._replays in ready:
                self._answer(self._replays)

    def _answer(self, replays: zmq.Socket[bytes]) -> None:
        """Answer one request for a replay. A reader that does not read gets no end, and asks again."""
        *envelope, wanted = replays.recv_multipart()
        if len(wanted) != _NUMBER_BYTES:
            _log.warning("a request for a replay of KV events has %d bytes, not %d", len(wanted), _NUMBER_BYTES)
            return
        first = max(0, int.from_bytes(wanted, "big", signed=True))
        try:
            for number, payload in self._event_log.replay(first):
                replays.send_multipart([*envelope, _number(number), payload], zmq.NOBLOCK)
            replays.send_multipart([*envelope, _END, b""], zmq.NOBLOCK)
        except zmq.ZMQError as exc:
            _log.warning("a replay of KV events from number %d was cut short: %s", first, exc)


def _number(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big")
