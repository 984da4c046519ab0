"""Connection to a peer: one RankConnection per source rank, and the reads over all of them.

    a read ──planned for each──► rank 1 ──chunks──► ┐
                                 rank 3 ──chunks──► ┴ all have ended: the read has ended, with one ReadResult

It is connected when all its ranks are. If one rank fails, the others are given up, since no read could succeed; their
chunks in flight are still polled to their end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

from connector.backends.nixl import ucx
from connector.backends.nixl.rank_connection import PendingRead, RankConnection, TransferContext
from connector.backends.nixl.transport import transport_of
from connector.completion_queue import CompletionQueue
from connector.planning.rank_mapping import SourceRank, error_prefix, naming_rank
from pdserve.errors import PeerError
from pdserve.kv.transports import Connected, combine
from pdserve.records import KVRead, Peer, ReadResult

logger = logging.getLogger(__name__)


class TransferStats:
    """Counters of the reads over one connection.

    ``seconds`` counts the time with at least one read under way, so bytes / seconds is the rate of the network.
    """

    def __init__(self) -> None:
        self.num_reads = 0  # ended reads, failed ones included
        self.num_failed = 0
        self.num_bytes = 0
        self.num_descriptors = 0
        self.seconds = 0.0
        self._num_under_way = 0
        self._counted_until = 0.0

    def __str__(self) -> str:
        return (
            f"{self.num_reads} reads ({self.num_failed} failed), {self.num_bytes} B in {self.num_descriptors} "
            f"descriptors, {self.seconds:.3f} s, {self.rate:.2f} GB/s"
        )

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.num_bytes / max(self.seconds, 1e-9) / 1e9

    def begin(self, ordered_at: float) -> None:
        """Count a read that was ordered at ``ordered_at`` of the monotonic clock."""
        if not self._num_under_way:
            self._counted_until = max(ordered_at, self._counted_until)
        self._num_under_way += 1

    def end(self, num_bytes: int, num_descriptors: int, failed: bool) -> float:
        """Count the end of a read. Return the seconds with reads under way since the last end."""
        now = time.monotonic()
        seconds = now - self._counted_until
        self._counted_until = now
        self._num_under_way -= 1
        self.num_reads += 1
        self.num_failed += failed
        self.num_bytes += num_bytes
        self.num_descriptors += num_descriptors
        self.seconds += seconds
        return seconds


class PeerConnection:
    """Used on the owner thread only. ``lanes`` has UCX's lanes for each source.

    Raises PeerError if a rank cannot be connected to or its memory is not what it announced. ``completions`` gets the
    connection after a first small read from every rank, and its failure once if it fails later.
    """

    def __init__(
        self,
        context: TransferContext,
        completions: CompletionQueue,
        peer: Peer,
        sources: Sequence[SourceRank],
        lanes: Sequence[str],
    ) -> None:
        self.connected = combine(
            [_connected(context, peer, source, of_source) for source, of_source in zip(sources, lanes, strict=True)]
        )
        self.agents = frozenset(source.rank.agent for source in sources)
        self.ready = False
        self.failure = ""  # reason, once nothing is read any more
        self.failed_at = 0.0
        self._name = f"{peer.node_id} (epoch {peer.epoch})"
        self._completions = completions
        self._stats = TransferStats()
        self._num_ranges = sum(source.num_ranges for source in sources)
        self._ranks: list[RankConnection] = []
        try:
            for source in sources:
                with naming_rank(peer, source.rank):
                    prefix = error_prefix(peer, source.rank)
                    self._ranks.append(RankConnection(context, source, prefix, self._report_failure))
        except PeerError:
            self._close_ranks()
            raise
        test = PendingRead(len(self._ranks), self._tested)
        for rank in self._ranks:
            rank.test_read(test)

    @property
    def busy(self) -> bool:
        return any(rank.busy for rank in self._ranks)

    @property
    def drained(self) -> bool:
        """Whether nothing from this peer can land any more or will be posted."""
        return bool(self.failure) and all(rank.drained for rank in self._ranks)

    def submit(self, read: KVRead, ordered_at: float) -> None:
        """Queue a read; an impossible one ends at once. Its time counts from ``ordered_at``."""
        try:
            if self.failure:
                raise PeerError(self.failure)
            plans = [rank.plan(read) for rank in self._ranks]
        except PeerError as error:
            self._completions.read_refused(read, f"{self._name}: {error}")
            return
        self._stats.begin(ordered_at)
        chunks = [chunk for plan in plans for chunk in plan]
        num_bytes = sum(chunk.num_bytes(part.source.slices) for part, chunk in chunks)
        num_descriptors = sum(chunk.num_ranges for _, chunk in chunks)
        end = partial(self._end, read, num_bytes, num_descriptors)
        pending = PendingRead(sum(map(len, plans)), end)
        if not any(plans):
            end("")
        for rank, chunks in zip(self._ranks, plans, strict=True):
            rank.submit(pending, chunks)

    def advance(self) -> bool:
        moved = [rank.advance() for rank in self._ranks]  # a list: any() would stop at the first
        return any(moved)

    def fail(self, reason: str) -> None:
        """Read nothing more. Reads end with ``reason`` once none of their chunks is in flight."""
        if self.failure:
            return
        self.failure = reason
        self.failed_at = time.monotonic()
        for rank in self._ranks:
            rank.fail(reason)

    def abort(self) -> None:
        for rank in self._ranks:
            rank.abort()

    def close(self) -> None:
        """Forget this peer in the agent; only once drained, or right before the agent is destroyed."""
        logger.info("connection to %s closed (%s): %s", self._name, self.failure or "node stopped", self._stats)
        self._close_ranks()

    def _close_ranks(self) -> None:
        for rank in self._ranks:
            rank.close()

    def _report_failure(self, reason: str) -> None:
        if not self.failure:
            self.fail(reason)
            self._completions.peer_failed(self.connected.epoch, f"{self._name}: {reason}")

    def _tested(self, error: str) -> None:
        if error:  # a rank failed, and reported that
            return
        self.ready = True
        ucx.log().forward()
        logger.info(
            "connected to %s over %s, ranks: %d, ranges of bytes per block: %d (UCX lanes: %s)",
            *(self._name, self.connected.transport, len(self._ranks), self._num_ranges),
            self.connected.lanes or "unknown, UCX_LOG_FILE or UCX_LOG_LEVEL is set",
        )
        self._completions.connected(self.connected)

    def _end(self, read: KVRead, num_bytes: int, num_descriptors: int, error: str) -> None:
        if error:
            seconds = self._stats.end(0, 0, failed=True)
            self._completions.read_ended(ReadResult(read.read_id, f"{self._name}: {error}", seconds=seconds))
            return
        seconds = self._stats.end(num_bytes, num_descriptors, failed=False)
        self._completions.read_ended(ReadResult(read.read_id, "", num_bytes, num_descriptors, seconds))
        if self._stats.num_reads == 1 and self.connected.transport == "tcp":
            logger.warning(
                "KV of %s comes over TCP, at %.2f GB/s; check UCX_TLS and UCX_NET_DEVICES, or refuse that with "
                "--require-transport (UCX lanes: %s)",
                *(self._name, self._stats.rate, self.connected.lanes),
            )


def _connected(context: TransferContext, peer: Peer, source: SourceRank, lanes: str) -> Connected:
    devices = context.rank.region.device, source.rank.region.device
    return Connected(peer.epoch, transport_of(lanes, "cuda" if "cuda" in devices else "cpu"), lanes)
