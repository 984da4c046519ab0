"""A connected peer: a link to each of its ranks that hold something of ours, and the reads over all of them.

    a read ──planned for each──► Link to rank 1 ──pieces──► ┐
                                 Link to rank 3 ──pieces──► ┴ all have ended: the read has ended, in one ReadResult

It stands and falls as one. It is connected when all links are; where one breaks the others are given up, since no read
could end well any more. Their pieces in flight are waited for all the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

from connector.backends.nixl import transport, ucx
from connector.backends.nixl.rank_link import Home, Pull, RankLink
from connector.backends.nixl.traffic import LinkTraffic
from connector.completion_queue import CompletionQueue
from connector.planning.rank_mapping import SourceRank, error_prefix, naming_rank
from pdserve.errors import PeerError
from pdserve.records import KVRead, Peer, ReadResult
from pdserve.transports import Connected, joined

logger = logging.getLogger(__name__)


class PeerConnection:
    """Used on the owner thread only. ``lanes`` are UCX's, by source.

    Raises PeerError when a rank cannot be connected to, or its memory is not what it says. The outbox learns that the
    peer is connected once a first small read from every rank has succeeded; and once if that does not last.
    """

    def __init__(
        self, home: Home, outbox: CompletionQueue, peer: Peer, sources: Sequence[SourceRank], lanes: Sequence[str]
    ) -> None:
        self.connected = joined([_way(home, peer, *pair) for pair in zip(sources, lanes, strict=True)])
        self.ready = False
        self.lost = ""  # why, once nothing is read any more
        self.lost_at = 0.0
        self._name = f"{peer.node_id} (epoch {peer.epoch})"
        self._outbox = outbox
        self._traffic = LinkTraffic()
        self._block_bytes = sum(source.slices.num_bytes for source in sources)
        self._num_ranges = sum(source.slices.num_ranges for source in sources)
        self._links: list[RankLink] = []
        try:
            for source in sources:
                with naming_rank(peer, source.rank):
                    self._links.append(RankLink(home, source, error_prefix(peer, source.rank), self._break))
        except PeerError:
            self._close_links()
            raise
        greeting = Pull(len(self._links), self._greeted)
        for link in self._links:
            link.greet(greeting)

    @property
    def busy(self) -> bool:
        return any(link.busy for link in self._links)

    @property
    def drained(self) -> bool:
        """Nothing of this peer can land any more, nor will be posted."""
        return bool(self.lost) and all(link.drained for link in self._links)

    def submit(self, read: KVRead, ordered_at: float) -> None:
        """Queue a read; one that cannot be done ends at once. Its time counts from ``ordered_at``."""
        try:
            if self.lost:
                raise PeerError(self.lost)
            plans = [link.plan(read) for link in self._links]
        except PeerError as error:
            self._outbox.refused(read, f"{self._name}: {error}")
            return
        self._traffic.begin(ordered_at)
        num_descriptors = sum(piece.num_ranges for pieces in plans for piece in pieces)
        end = partial(self._end, read, num_descriptors)
        pull = Pull(sum(map(len, plans)), end)
        if not read.local_blocks:
            end("")
        for link, pieces in zip(self._links, plans, strict=True):
            link.submit(pull, pieces)

    def advance(self) -> bool:
        """Let every link take a step; True when anything moved."""
        moved = [link.advance() for link in self._links]  # all, so no any(…) around it
        return True in moved

    def give_up(self, reason: str) -> None:
        """Read nothing more. Reads end with ``reason`` as soon as nothing of theirs is in flight."""
        if self.lost:
            return
        self.lost, self.lost_at = reason, time.monotonic()
        for link in self._links:
            link.give_up(reason)

    def abandon(self) -> None:
        """Make what is in flight end now."""
        for link in self._links:
            link.abandon()

    def close(self) -> None:
        """Let the agent forget this peer; only once drained, or when the agent is destroyed right after."""
        logger.info("connection to %s closed (%s): %s", self._name, self.lost or "node stopped", self._traffic)
        self._close_links()

    def _close_links(self) -> None:
        for link in self._links:
            link.close()

    def _break(self, reason: str) -> None:
        """A link broke."""
        if not self.lost:
            self.give_up(reason)
            self._outbox.failed(self.connected.epoch, f"{self._name}: {reason}")

    def _greeted(self, error: str) -> None:
        if error:  # a link broke, and that was told
            return
        self.ready = True
        ucx.log().pass_on()
        logger.info(
            "connected to %s over %s, ranks: %d, ranges of bytes per block: %d (UCX lanes: %s)",
            *(self._name, self.connected.transport, len(self._links), self._num_ranges),
            self.connected.lanes or "unknown, its log is not ours",
        )
        self._outbox.connected(self.connected)

    def _end(self, read: KVRead, num_descriptors: int, error: str) -> None:
        if error:
            seconds = self._traffic.end(0, 0, failed=True)
            result = ReadResult(read.read_id, f"{self._name}: {error}", seconds=seconds)
            self._outbox.ended(result)
            return
        num_bytes = len(read.local_blocks) * self._block_bytes
        seconds = self._traffic.end(num_bytes, num_descriptors, failed=False)
        self._outbox.ended(ReadResult(read.read_id, "", num_bytes, num_descriptors, seconds))
        if self._traffic.num_reads == 1 and self.connected.transport == "tcp":
            logger.warning(
                "KV of %s comes over TCP, at %.2f GB/s; check UCX_TLS and UCX_NET_DEVICES, or refuse that with "
                "--require-transport (UCX lanes: %s)",
                *(self._name, self._traffic.rate, self.connected.lanes),
            )


def _way(home: Home, peer: Peer, source: SourceRank, lanes: str) -> Connected:
    """Which way the bytes of one link take."""
    devices = home.region.device, source.rank.region.device
    return Connected(peer.epoch, transport.kind_of(lanes, "cuda" if "cuda" in devices else "cpu"), lanes)
