"""Metrics that only nodes that decode have; docs/metrics.md describes them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta
from prometheus_client.metrics_core import Metric

from pdserve.ipc.messages import ReadChecked, ReadEnded
from pdserve.metrics import MetricSet, Reading
from pdserve.records import ReadResult

_log = logging.getLogger(__name__)

TTFT_PARTS = ("reserve", "queue", "prefill", "lost")  # of the time to first token; docs/traces.md
_BOUNDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.5, 10.0)  # seconds


class PeerCounters(msgspec.Struct):
    """Counters of a prefill node; ``X`` is exported as ``pdserve_X_total``, with the meaning given here."""

    kv_reads: Annotated[int, Meta(description="Reads that ended.")] = 0
    kv_read_failures: Annotated[int, Meta(description="Reads whose bytes did not arrive or were corrupt.")] = 0
    kv_read_bytes: Annotated[int, Meta(description="Bytes that arrived.")] = 0
    kv_read_descriptors: Annotated[int, Meta(description="Byte ranges of reads.")] = 0
    kv_read_seconds: Annotated[float, Meta(description="Time with at least one read in flight.")] = 0.0
    kv_checksum_failures: Annotated[int, Meta(description="Blocks that differed from their digests.")] = 0
    peer_losses: Annotated[int, Meta(description="Lost connections.")] = 0


class PeerMetrics:
    """Metrics of the prefill node at an address, over all its epochs."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.epoch = ""  # newest
        self.is_own = False  # the address is that of this node: no peer
        self.transport = ""  # of the connection; empty without one
        self.counters = PeerCounters()

    def count(self, read: ReadResult) -> None:
        counters = self.counters
        counters.kv_reads += 1
        counters.kv_read_failures += bool(read.error)
        counters.kv_read_bytes += read.num_bytes
        counters.kv_read_descriptors += read.num_descriptors
        counters.kv_read_seconds += read.seconds


class DecodeMetrics:
    """``exposed`` is observed once per handoff that succeeds, and ``first_step`` when the engine's first token follows
    it.
    """

    def __init__(self, model: str) -> None:
        self._metrics = metrics = MetricSet(model)
        self._peers: list[PeerMetrics] = []
        self.requests = metrics.counter("pdserve_decode_requests", "Requests received.")
        self.request_failures = metrics.counter("pdserve_decode_request_failures", "Requests that ended with an error.")
        self.handed_over = metrics.counter(
            "pdserve_requests_handed_over", "Requests that other nodes continue, as this node or its P drains."
        )
        self.local_prefills = metrics.counter("pdserve_local_prefills", "Prompts prefilled on this node by choice.")
        self.handoffs = metrics.counter("pdserve_handoffs", "Handoffs begun.")
        self.ahead_tokens = metrics.counter(
            "pdserve_handoff_ahead_tokens", "Tokens after the first that P decoded ahead while D read the KV."
        )
        self.handoff_failures = metrics.counter(
            "pdserve_handoff_failures", "Handoffs that failed, and requests whose prefill node was not connected."
        )
        self.handoff_refusals = metrics.counter("pdserve_handoff_refusals", "Handoffs that P refused for lack of room.")
        self.recomputes = metrics.counter(
            "pdserve_handoff_recomputes", "Prompts prefilled on this node after a failed handoff."
        )
        self.recomputed_tokens = metrics.counter(
            "pdserve_handoff_recomputed_tokens", "Prompt tokens of recomputes whose KV was not on this node."
        )
        self.pulled_tokens = metrics.counter(
            "pdserve_pulled_tokens", "Tokens of moved streams whose KV was read from the prefix cache of a peer."
        )
        self.pull_misses = metrics.counter(
            "pdserve_pull_misses", "Pulls that found nothing more in the peer's prefix cache than this node had."
        )
        self.exposed = metrics.histogram(
            "pdserve_handoff_exposed_seconds", "From the first token to confirmed KV.", _BOUNDS
        )
        self.first_step = metrics.histogram(
            "pdserve_handoff_first_step_seconds", "From confirmed KV to the next token.", _BOUNDS
        )
        self._ttft = metrics.labeled_histogram(
            "pdserve_ttft_part_seconds",
            "Parts of the time to first token.",
            "part",
            _BOUNDS,
            TTFT_PARTS,
            also={"queue": "vllm:request_queue_time_seconds", "prefill": "vllm:request_prefill_time_seconds"},
        )
        metrics.read_totals(
            "pdserve", PeerCounters, lambda: {(peer.address,): peer.counters for peer in self._shown()}, ["peer"]
        )
        metrics.read_gauge(
            "pdserve_peer_connected", "1 while the peer is connected.", self._connected, ["peer", "transport"]
        )

    def add_peer(self, address: str) -> PeerMetrics:
        self._peers.append(PeerMetrics(address))
        return self._peers[-1]

    def drop_peer(self, address: str) -> None:
        self._peers = [peer for peer in self._peers if peer.address != address]

    def observe_ttft(self, parts: Mapping[str, float]) -> None:
        for part, seconds in parts.items():
            self._ttft.of(part).observe(seconds)

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
                _log.warning("KV from prefill node %s is corrupt: %s", peer.address, read.error)

    def collect(self) -> Iterable[Metric]:
        return self._metrics.collect()

    def _connected(self) -> Reading:
        return {(peer.address, peer.transport or "none"): float(bool(peer.transport)) for peer in self._shown()}

    def _shown(self) -> list[PeerMetrics]:
        return [peer for peer in self._peers if not peer.is_own]
