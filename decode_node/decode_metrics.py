"""Metrics that only nodes that decode have; docs/metrics.md describes them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from pdserve.ipc.messages import ReadChecked, ReadEnded
from pdserve.metrics import FastHistogram, LabeledHistogram
from pdserve.records import ReadResult

_log = logging.getLogger(__name__)

COUNTERS = {
    "pdserve_decode_requests_total": "Requests received.",
    "pdserve_decode_request_failures_total": "Requests that ended with an error.",
    "pdserve_requests_handed_over_total": "Requests that other nodes continue, as this node or its P drains.",
    "pdserve_local_prefills_total": "Prompts prefilled on this node by choice.",
    "pdserve_handoffs_total": "Handoffs begun.",
    "pdserve_handoff_ahead_tokens_total": "Tokens after the first that P decoded ahead while D read the KV.",
    "pdserve_handoff_failures_total": "Handoffs that failed, and requests whose prefill node was not connected.",
    "pdserve_handoff_refusals_total": "Handoffs that P refused for lack of room.",
    "pdserve_handoff_recomputes_total": "Prompts prefilled on this node after a failed handoff.",
    "pdserve_handoff_recomputed_tokens_total": "Prompt tokens of recomputes whose KV was not on this node.",
}
PEER_COUNTERS = {
    "pdserve_kv_reads_total": "Reads that ended.",
    "pdserve_kv_read_failures_total": "Reads whose bytes did not arrive or were corrupt.",
    "pdserve_kv_read_bytes_total": "Bytes that arrived.",
    "pdserve_kv_read_descriptors_total": "Byte ranges of reads.",
    "pdserve_kv_read_seconds_total": "Time with at least one read in flight.",
    "pdserve_kv_checksum_failures_total": "Blocks that differed from their digests.",
    "pdserve_peer_losses_total": "Lost connections.",
}
TTFT_PARTS = ("reserve", "queue", "prefill", "lost")  # of the time to first token; docs/traces.md
_BOUNDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.5, 10.0)  # seconds


class PeerMetrics:
    """Metrics of the prefill node at an address, over all its epochs."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.epoch = ""  # newest
        self.is_own = False  # the address is that of this node: no peer
        self.transport = ""  # of the connection; empty without one
        self.counters = dict.fromkeys(PEER_COUNTERS, 0.0)

    def count(self, read: ReadResult) -> None:
        counters = self.counters
        counters["pdserve_kv_reads_total"] += 1
        counters["pdserve_kv_read_failures_total"] += bool(read.error)
        counters["pdserve_kv_read_bytes_total"] += read.num_bytes
        counters["pdserve_kv_read_descriptors_total"] += read.num_descriptors
        counters["pdserve_kv_read_seconds_total"] += read.seconds


class DecodeMetrics:
    """``counters`` has the counters without labels. ``exposed`` is observed once per handoff that succeeds, and
    ``first_step`` when the engine's first token follows it.
    """

    def __init__(self) -> None:
        self.counters = dict.fromkeys(COUNTERS, 0.0)
        self.exposed = FastHistogram(
            "pdserve_handoff_exposed_seconds", "From the first token to confirmed KV.", _BOUNDS
        )
        self.first_step = FastHistogram(
            "pdserve_handoff_first_step_seconds", "From confirmed KV to the next token.", _BOUNDS
        )
        self._ttft = LabeledHistogram(
            "pdserve_ttft_part_seconds", "Parts of the time to first token.", "part", TTFT_PARTS, _BOUNDS
        )
        self._peers: list[PeerMetrics] = []

    def add_peer(self, address: str) -> PeerMetrics:
        self._peers.append(PeerMetrics(address))
        return self._peers[-1]

    def drop_peer(self, address: str) -> None:
        self._peers = [peer for peer in self._peers if peer.address != address]

    def observe_ttft(self, parts: Mapping[str, float]) -> None:
        for part, seconds in parts.items():
            self._ttft.observe(part, seconds)

    def count_read(self, read: ReadEnded) -> None:
        """Count a read that has ended. Drop reads that belong to an earlier epoch of the peer."""
        for peer in self._peers:
            if peer.epoch == read.epoch:
                peer.count(read.result)

    def count_checked(self, read: ReadChecked) -> None:
        """Count a read with blocks that differ from their digests as failed; log the first of them."""
        for peer in self._peers if read.num_corrupt else ():
            if peer.epoch == read.epoch:
                peer.counters["pdserve_kv_read_failures_total"] += 1
                peer.counters["pdserve_kv_checksum_failures_total"] += read.num_corrupt
                _log.warning("KV from prefill node %s is corrupt: %s", peer.address, read.error)

    def collect(self) -> Iterator[Metric]:
        for name, documentation in COUNTERS.items():
            yield CounterMetricFamily(name, documentation, self.counters[name])
        for histogram in (self.exposed, self.first_step, self._ttft):
            yield from histogram.collect()
        peers = [peer for peer in self._peers if not peer.is_own]
        for name, documentation in PEER_COUNTERS.items():
            family = CounterMetricFamily(name, documentation, labels=["peer"])
            for peer in peers:
                family.add_metric([peer.address], peer.counters[name])
            yield family
        connected = GaugeMetricFamily(
            "pdserve_peer_connected", "1 while the peer is connected.", labels=["peer", "transport"]
        )
        for peer in peers:
            connected.add_metric([peer.address, peer.transport or "none"], float(bool(peer.transport)))
        yield connected
