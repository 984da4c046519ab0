"""What routers are told of a node, as it changes: the source of Node.Watch.

    engine ──Batch──► Watching ─┬─► Watcher: changes of the cache since its last report ──► a router
                                └─► Watcher …

A router that reads slowly holds nobody up: what it has not been told adds up to no more than what has come and gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager

from engine.ipc.messages import Batch, Status
from engine.kv_cache.block_pool import KVEvents
from pdserve.hashing import NUMBER_BYTES
from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import throughput_to_pb

MOST_BLOCKS = 65_536  # of one node that routers are told of

_HEARTBEAT = 1.0  # seconds without a change


def sample_bits(num_blocks: int) -> int:
    """Of a cache of so many blocks routers are told of those whose number ends with so many zero bits."""
    return max(0, (num_blocks - 1).bit_length() - MOST_BLOCKS.bit_length() + 1)


class ReportSubscriber:
    """One router. ``changed`` is set while there is something that it has not been told of."""

    def __init__(self, known: dict[bytes, None]) -> None:
        self.changed = asyncio.Event()
        self._changes = KVEvents()
        for digest in known:
            self._changes.add(digest)

    def cache_changed(self, batch: Batch) -> None:
        for digest in batch.cached:
            self._changes.add(digest)
        for digest in batch.evicted:
            self._changes.remove(digest)

    def take(self, sample_bits: int) -> pb.CacheChange:
        """What has changed in the cache since the last time."""
        added, removed = self._changes.take()
        return pb.CacheChange(added=_numbers(added, sample_bits), removed=_numbers(removed, sample_bits))


def _numbers(digests: list[bytes], sample_bits: int) -> bytes:
    if not sample_bits:
        return b"".join([digest[:NUMBER_BYTES] for digest in digests])
    mask = (1 << sample_bits) - 1
    cut = (digest[:NUMBER_BYTES] for digest in digests)
    return b"".join([number for number in cut if not int.from_bytes(number, "little") & mask])


class NodeReports:
    """All who watch a node."""

    def __init__(self, describe: Callable[[], pb.NodeDescription], pause: float = 0.1) -> None:
        """``pause`` is how many seconds lie between two reports at least."""
        self._describe = describe
        self._pause = pause
        self._status: Status | None = None
        self._cached: dict[bytes, None] = {}  # digests, oldest first
        self._watchers: set[ReportSubscriber] = set()
        self._ended = False

    def on_batch(self, batch: Batch) -> None:
        """News of the engine."""
        for digest in batch.cached:
            self._cached[digest] = None
        for digest in batch.evicted:
            self._cached.pop(digest, None)
        before, self._status = self._status, batch.status
        changed = before is None or _differ(before, batch.status)
        for watcher in self._watchers:
            if batch.cached or batch.evicted:
                watcher.cache_changed(batch)
            if changed or batch.cached or batch.evicted:
                watcher.changed.set()

    def wake(self) -> None:
        """The description has changed."""
        for watcher in self._watchers:
            watcher.changed.set()

    def end(self) -> None:
        """Nothing will change any more."""
        self._ended = True
        self.wake()

    async def reports(self, pause: float = 0.0) -> AsyncGenerator[pb.NodeReport, None]:
        """For one router, until the node ends; ``pause`` is how many seconds it wants between two of them at least."""
        pause = min(max(pause, self._pause), _HEARTBEAT)
        sequence, told = 0, pb.NodeDescription()
        with self._watched() as watcher:
            while True:
                watcher.changed.clear()
                sequence, last = sequence + 1, self._ended
                description = self._describe()
                cache = watcher.take(description.cache_sample_bits)
                report = pb.NodeReport(sequence=sequence, load=self._load(description), cache=cache)
                if description != told:
                    report.description.CopyFrom(description)
                    told = description
                yield report
                if last:
                    return
                await asyncio.sleep(pause)
                await _wait(watcher.changed, _HEARTBEAT - pause)

    @contextmanager
    def _watched(self) -> Iterator[ReportSubscriber]:
        watcher = ReportSubscriber(self._cached)
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    def _load(self, description: pb.NodeDescription) -> pb.NodeLoad:
        status = self._status
        if status is None:
            total = description.kv_layout.num_blocks
            return pb.NodeLoad(free_blocks=total, total_blocks=total)
        return pb.NodeLoad(
            free_blocks=status.free,
            total_blocks=status.total,
            waiting=status.waiting,
            running=status.reading + status.running,
            backlog=status.backlog,
            throughput=throughput_to_pb(status.throughput),
        )


def _differ(one: Status, other: Status) -> bool:
    """Whether a router might choose otherwise, beyond what changes with every step."""
    return (one.waiting, one.reading, one.running, one.backlog) != (
        other.waiting,
        other.reading,
        other.running,
        other.backlog,
    ) or abs(one.free - other.free) * 100 > one.total


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
