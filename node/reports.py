"""Reports of a node's description, load and cache changes to routers: the source of Node.Watch.

    engine ──EventBatch──► NodeReports ─┬─► ReportSubscriber: changes since its last report ──► a router
                                   └─► ReportSubscriber …

A slow router delays no other: its unreported changes are merged, so they never outgrow the cache. Each report has the
digest of the whole cache: a router whose index differs begins again. Images with embeddings are reported like blocks.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import reduce
from itertools import islice
from operator import xor

from pdserve.hashing import SHORT_HASH_BYTES
from pdserve.ipc.key_changes import KeyChanges
from pdserve.ipc.messages import EventBatch, Status
from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.message_limits import MAX_REPORTED_BLOCKS, MAX_REPORTED_IMAGES
from pdserve.rpc.protobuf import step_costs_to_pb

_REPORT_INTERVAL = 1.0  # seconds between two reports at most


def sample_bits(num_blocks: int) -> int:
    """Return how many low bits of a short block hash must be zero for the block to be reported."""
    return max(0, (num_blocks - 1).bit_length() - MAX_REPORTED_BLOCKS.bit_length() + 1)


_SHARE_SECONDS = 1.0  # time constant of PromptShare: half of the life of a stream, so that nodes soon follow a load


class PromptShare:
    """The share of recent time that an engine's steps spent on prompts: an exponential mean over ``_SHARE_SECONDS``."""

    def __init__(self, now: float) -> None:
        """``now`` is the engine's start, in seconds."""
        self._share = 0.0
        self._at = now
        self._total = 0.0

    def update(self, prompt_seconds: float, now: float) -> float:
        """Return the share, 0 … 1, given the seconds spent on prompts since the engine's start."""
        if (passed := now - self._at) > 0.0:
            rest = -math.expm1(-passed / _SHARE_SECONDS)  # weight of the time that has passed
            self._share = (1.0 - rest) * self._share + rest / passed * (prompt_seconds - self._total)
            self._at = now
            self._total = prompt_seconds
        return min(self._share, 1.0)


class CacheDigest:
    """XOR of the short hashes of all cached blocks, of any sample of them; likewise of images, by their digests."""

    def __init__(self) -> None:
        self._by_zeros: dict[int, int] = {}  # XOR of hashes, by 1 + their number of low zero bits

    def toggle(self, block_hash: bytes) -> None:
        """Add a block that has entered the cache, or remove one that has left it."""
        short = int.from_bytes(block_hash[:SHORT_HASH_BYTES], "little")
        zeros = (short & -short).bit_length()
        self._by_zeros[zeros] = self._by_zeros.get(zeros, 0) ^ short

    def of_sample(self, sample_bits: int) -> int:
        return reduce(xor, (digest for zeros, digest in self._by_zeros.items() if zeros > sample_bits), 0)


class _EngineReports:
    """Reports of one engine. A new engine begins with an empty cache and counters of 0."""

    def __init__(self) -> None:
        self.status: Status | None = None
        self.prompt_share = PromptShare(time.monotonic())
        self.cached: dict[bytes, None] = {}  # block hashes, oldest first
        self.digest = CacheDigest()
        self.images: dict[bytes, None] = {}  # digests of images with embeddings, oldest first
        self.images_digest = CacheDigest()

    def on_batch(self, batch: EventBatch) -> list[bytes]:
        """Return the images that are not reported any more: they were dropped, or there are too many newer ones."""
        self.status = batch.status
        _change(self.cached, self.digest, batch.cached, batch.evicted)
        removed = [image for image in batch.images_dropped if image in self.images]
        _change(self.images, self.images_digest, batch.images_cached, removed)
        excess = list(islice(self.images, max(0, len(self.images) - MAX_REPORTED_IMAGES)))
        _change(self.images, self.images_digest, (), excess)
        return removed + excess


def _change(keys: dict[bytes, None], digest: CacheDigest, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
    for key in added:
        if key not in keys:
            keys[key] = None
            digest.toggle(key)
    for key in removed:
        if key in keys:
            del keys[key]
            digest.toggle(key)


class ReportSubscriber:
    """One router. ``changed`` is set while there is something to report to it."""

    def __init__(self, cached: Iterable[bytes], images: Iterable[bytes]) -> None:
        self.changed = asyncio.Event()
        self._reported: Status | None = None
        self._changes = KeyChanges[bytes]()
        self._changes.add(*cached)
        self._images = KeyChanges[bytes]()
        self._images.add(*images)

    def on_batch(self, batch: EventBatch, removed_images: Sequence[bytes]) -> None:
        self._changes.add(*batch.cached)
        self._changes.remove(*batch.evicted)
        self._images.add(*batch.images_cached)
        self._images.remove(*removed_images)
        has_changes = batch.cached or batch.evicted or batch.images_cached or removed_images
        if has_changes or self._reported is None or _differ(self._reported, batch.status):
            self.changed.set()

    def lost(self, cached: Iterable[bytes], images: Iterable[bytes]) -> None:
        """The engine has ended, with these blocks and images."""
        self._changes.remove(*cached)
        self._images.remove(*images)
        self.changed.set()

    def take(self, status: Status | None, digest: int, sample_bits: int) -> pb.CacheChange:
        """Return the cache changes since the last call; ``status`` and ``digest`` are reported with them."""
        self.changed.clear()
        self._reported = status
        added, removed = (_short_hashes(hashes, sample_bits) for hashes in self._changes.take())
        return pb.CacheChange(added=added, removed=removed, digest=digest)

    def take_images(self, digest: int) -> pb.CacheChange:
        """Return the changes of images since the last call; ``digest`` is reported with them."""
        added, removed = (_short_hashes(digests, 0) for digests in self._images.take())
        return pb.CacheChange(added=added, removed=removed, digest=digest)


def _short_hashes(hashes: list[bytes], sample_bits: int) -> bytes:
    if not sample_bits:
        return b"".join([block_hash[:SHORT_HASH_BYTES] for block_hash in hashes])
    mask = (1 << sample_bits) - 1
    cut = (block_hash[:SHORT_HASH_BYTES] for block_hash in hashes)
    return b"".join([short_hash for short_hash in cut if not int.from_bytes(short_hash, "little") & mask])


class NodeReports:
    """All subscribers of a node's reports."""

    def __init__(self, describe: Callable[[], pb.NodeDescription], pause: float = 0.02) -> None:
        """``pause`` is the least time between two reports, in seconds."""
        self.describe = describe
        self._pause = pause
        self._engine = _EngineReports()
        self._subscribers: set[ReportSubscriber] = set()
        self._ended = False

    def on_batch(self, batch: EventBatch) -> None:
        """Take in load and cache changes from the engine."""
        removed_images = self._engine.on_batch(batch)
        for subscriber in self._subscribers:
            subscriber.on_batch(batch, removed_images)

    def begin_engine(self) -> None:
        """The engine has ended, or has not begun: nothing of an earlier one holds."""
        for subscriber in self._subscribers:
            subscriber.lost(self._engine.cached, self._engine.images)
        self._engine = _EngineReports()

    def wake(self) -> None:
        """Report to all subscribers: the description has changed."""
        for subscriber in self._subscribers:
            subscriber.changed.set()

    def end(self) -> None:
        """Send a last report to every subscriber, then end its stream."""
        self._ended = True
        self.wake()

    async def subscribe(self, pause: float = 0.0) -> AsyncGenerator[pb.NodeReport, None]:
        """Yield reports to one router until the node ends, at least ``pause`` seconds apart."""
        pause = min(max(pause, self._pause), _REPORT_INTERVAL)
        sequence = 0
        reported = pb.NodeDescription()
        with self._subscribed() as subscriber:
            while True:
                sequence += 1
                last = self._ended
                description = self.describe()
                bits = description.cache_sample_bits
                cache = subscriber.take(self._engine.status, self._engine.digest.of_sample(bits), bits)
                images = subscriber.take_images(self._engine.images_digest.of_sample(0))
                report = pb.NodeReport(sequence=sequence, load=self._load(description), cache=cache, images=images)
                if description != reported:
                    report.description.CopyFrom(description)
                    reported = description
                yield report
                if last:
                    return
                await asyncio.sleep(pause)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_REPORT_INTERVAL - pause):
                        await subscriber.changed.wait()

    @contextmanager
    def _subscribed(self) -> Iterator[ReportSubscriber]:
        subscriber = ReportSubscriber(self._engine.cached, self._engine.images)
        self._subscribers.add(subscriber)
        try:
            yield subscriber
        finally:
            self._subscribers.discard(subscriber)

    def _load(self, description: pb.NodeDescription) -> pb.NodeLoad:
        status = self._engine.status
        if status is None:
            total = description.kv_layout.num_blocks
            return pb.NodeLoad(free_blocks=total, total_blocks=total)
        return pb.NodeLoad(
            free_blocks=status.free,
            total_blocks=status.total,
            waiting=status.waiting,
            running=status.reading + status.running,
            backlog=status.backlog,
            throughput=step_costs_to_pb(status.costs),
            decoding=status.decoding,
            for_peers=status.for_peers,
            prompt_share=self._engine.prompt_share.update(status.totals.prompt_seconds, time.monotonic()),
            itl_target_ms=status.itl_target * 1e3,
            itl_limit_ms=status.itl_limit * 1e3,
            ttft_target_ms=status.ttft_target * 1e3,
        )


def _differ(reported: Status, status: Status) -> bool:
    """Whether a router might choose otherwise: other requests or backlog, or free blocks that moved by over 1 %."""
    if abs(reported.free - status.free) * 100 > status.total:
        return True
    names = ("waiting", "reading", "running", "backlog", "decoding", "for_peers")
    return any(getattr(reported, name) != getattr(status, name) for name in names)
