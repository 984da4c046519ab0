"""Metrics of the nodes that this node reads KV from; docs/metrics.md describes them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta
from prometheus_client.metrics_core import Metric

from pdserve.errors import LeaseRevoked, PdserveError
from pdserve.ipc.messages import ReadChecked, ReadEnded
from pdserve.metrics import MetricSet, Reading
from pdserve.records import ReadResult
from pdserve.request_cost import StepCosts, pull_seconds

_log = logging.getLogger(__name__)


class PeerCounters(msgspec.Struct):
    """Counters of a peer; ``X`` is exported as ``pdserve_X_total``, with the meaning given here."""

    kv_reads: Annotated[int, Meta(description="Reads that ended.")] = 0
    kv_read_failures: Annotated[int, Meta(description="Reads whose bytes did not arrive or were corrupt.")] = 0
    kv_read_bytes: Annotated[int, Meta(description="Bytes that arrived.")] = 0
    kv_read_descriptors: Annotated[int, Meta(description="Byte ranges of reads.")] = 0
    kv_read_seconds: Annotated[float, Meta(description="Time with at least one read in flight.")] = 0.0
    kv_checksum_failures: Annotated[int, Meta(description="Blocks that differed from their digests.")] = 0
    peer_losses: Annotated[int, Meta(description="Lost connections.")] = 0


class PeerMetrics:
    """Metrics of the peer at an address, over all its epochs."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.epoch = ""  # the newest epoch
        self.is_own = False  # the address is this node's own: not a peer
        self.transport = ""  # the connection's; empty without a connection
        self.counters = PeerCounters()

    def count(self, read: ReadResult) -> None:
        counters = self.counters
        counters.kv_reads += 1
        counters.kv_read_failures += bool(read.error)
        counters.kv_read_bytes += read.num_bytes
        counters.kv_read_descriptors += read.num_descriptors
        counters.kv_read_seconds += read.seconds


class ReadingMetrics:
    """Metrics of reads, by peer, and of pulls."""

    def __init__(self) -> None:
        self._metrics = metrics = MetricSet()
        self._peers: list[PeerMetrics] = []
        self.pulled_tokens = metrics.counter(
            "pdserve_pulled_tokens",
            "Tokens of prompts and moved streams whose KV was read from a peer's prefix cache.",
        )
        self.pull_computed_tokens = metrics.counter(
            "pdserve_pull_computed_tokens",
            "Tokens that were computed while the KV of those behind them was pulled, of pulls that succeeded.",
        )
        self.pull_misses = metrics.counter(
            "pdserve_pull_misses", "Pulls that found nothing more in the peer's prefix cache than this node had."
        )
        self.pull_failures = metrics.counter(
            "pdserve_pull_failures", "Pulls of prefixes that failed or were late: their tokens were computed."
        )
        self._pull_revocations = metrics.counter(
            "pdserve_pull_revocations", "Pulls that failed since the peer took the lease back to use its blocks itself."
        )
        self._pull_expected_saved = metrics.counter(
            "pdserve_pull_expected_saved_seconds", "Time that pulls were to save: predicted to compute, minus to pull."
        )
        self._pull_saved = metrics.counter(
            "pdserve_pull_saved_seconds", "Time that pulls have saved: predicted to compute, minus measured."
        )
        self._pull_lost = metrics.counter(
            "pdserve_pull_lost_seconds", "Time lost by pulls that took longer than to compute, or that failed."
        )
        metrics.read_totals(
            "pdserve", PeerCounters, lambda: {(peer.address,): peer.counters for peer in self._shown()}, ["peer"]
        )
        metrics.read_gauge(
            "pdserve_peer_connected", "1 while the peer is connected.", self._connected, ["peer", "transport"]
        )

    def count_pull(self, num_tokens: int, costs: StepCosts, seconds: float, *, computed: int = 0) -> None:
        """Count a pull that brought the KV of ``num_tokens`` tokens after ``seconds``; 0 or less: it found nothing.

        Meanwhile this node computed ``computed`` tokens before them, at its ``costs``.
        """
        num_tokens = max(0, num_tokens)
        self.pulled_tokens.inc(num_tokens)
        self.pull_misses.inc(not num_tokens)
        self.pull_computed_tokens.inc(computed if num_tokens else 0)
        slope = costs.prompt.slope
        if num_tokens and (compute := slope * (computed + num_tokens)):
            expected = max(slope * computed, pull_seconds(costs, num_tokens))
            self._pull_expected_saved.inc(max(0.0, compute - expected))
            self._pull_saved.inc(max(0.0, compute - seconds))
            self._pull_lost.inc(max(0.0, seconds - compute))
        elif not num_tokens:
            self._pull_lost.inc(seconds)

    def count_failed_pull(self, error: PdserveError, seconds: float = 0.0) -> None:
        """Count the reason of a pull that failed after ``seconds``, of a prefix or a moved stream."""
        self._pull_revocations.inc(isinstance(error, LeaseRevoked))
        self._pull_lost.inc(seconds)

    def add_peer(self, address: str) -> PeerMetrics:
        self._peers.append(PeerMetrics(address))
        return self._peers[-1]

    def drop_peer(self, address: str) -> None:
        self._peers = [peer for peer in self._peers if peer.address != address]

    def count_read(self, read: ReadEnded) -> None:
        """Count a read that has ended. Drop reads that belong to an earlier epoch of the peer."""
        for peer in self._peers:
            if peer.epoch == read.epoch:
                peer.count(read.result)

    def count_checked(self, read: ReadChecked) -> None:
        """Count a read with blocks that differ from their digests as failed; log the first of them."""
        for peer in self._peers if read.num_corrupt else ():
            if peer.epoch == read.epoch:
                peer.counters.kv_read_failures += 1
                peer.counters.kv_checksum_failures += read.num_corrupt
                _log.warning("KV from node %s is corrupt: %s", peer.address, read.error)

    def collect(self) -> Iterable[Metric]:
        return self._metrics.collect()

    def _connected(self) -> Reading:
        return {(peer.address, peer.transport or "none"): float(bool(peer.transport)) for peer in self._shown()}

    def _shown(self) -> list[PeerMetrics]:
        return [peer for peer in self._peers if not peer.is_own]
