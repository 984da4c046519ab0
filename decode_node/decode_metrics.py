"""What a decode node counts. Names, units and meanings: docs/metrics.md."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from engine.ipc.messages import ReadEnded
from pdserve.metrics import FastHistogram, LabeledHistogram
from pdserve.transports import Connected

_log = logging.getLogger(__name__)

COUNTERS = {
    "pdserve_decode_requests_total": "Requests received.",
    "pdserve_decode_request_failures_total": "Requests that ended with an error.",
    "pdserve_requests_handed_over_total": "Requests left to other nodes since this one, or its P, drains.",
    "pdserve_local_prefills_total": "Prompts prefilled here by choice.",
    "pdserve_handoffs_total": "Handoffs begun.",
    "pdserve_handoff_ahead_tokens_total": "Tokens after the first that P has sampled, while its KV was on the way.",
    "pdserve_handoff_failures_total": "Handoffs that failed, and requests whose prefill node was not connected.",
    "pdserve_handoff_recomputes_total": "Prompts prefilled here after that.",
    "pdserve_handoff_recomputed_tokens_total": "Prompt tokens of these that were not here.",
}
PEER_COUNTERS = {
    "pdserve_kv_reads_total": "Reads that ended.",
    "pdserve_kv_read_failures_total": "Reads without their bytes, or with others than announced.",
    "pdserve_kv_read_bytes_total": "Bytes that arrived.",
    "pdserve_kv_read_descriptors_total": "Ranges of bytes that they came in.",
    "pdserve_kv_read_seconds_total": "Time with at least one read under way.",
    "pdserve_kv_checksum_failures_total": "Blocks that differed from their digests.",
    "pdserve_peer_losses_total": "Connections that were lost.",
}
TTFT_PARTS = ("reserve", "queue", "prefill", "lost")  # of a request's way to its first token; docs/traces.md
_BOUNDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.5, 10.0)  # seconds


class PeerMetrics:
    """Of the prefill node at an address, through all its lives."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.epoch = ""  # of its newest life
        self.transport = ""  # of the connection to it, "" without one
        self.counters = dict.fromkeys(PEER_COUNTERS, 0.0)

    def count(self, read: ReadEnded) -> None:
        counters = self.counters
        counters["pdserve_kv_reads_total"] += 1
        counters["pdserve_kv_read_failures_total"] += bool(read.error)
        counters["pdserve_kv_read_bytes_total"] += read.num_bytes
        counters["pdserve_kv_read_descriptors_total"] += read.num_descriptors
        counters["pdserve_kv_read_seconds_total"] += read.seconds
        counters["pdserve_kv_checksum_failures_total"] += read.num_corrupt


class DecodeMetrics:
    """``counters`` are those without labels, by name; ``exposed`` is observed once per handoff that succeeds, and
    ``first_step`` once a step has brought a token here.
    """

    def __init__(self) -> None:
        self.counters = dict.fromkeys(COUNTERS, 0.0)
        self.exposed = FastHistogram(
            "pdserve_handoff_exposed_seconds", "From the first token to KV that may be used.", _BOUNDS
        )
        self.first_step = FastHistogram("pdserve_handoff_first_step_seconds", "From there to the next token.", _BOUNDS)
        self._ttft = LabeledHistogram(
            "pdserve_ttft_part_seconds", "What first tokens waited for.", "part", TTFT_PARTS, _BOUNDS
        )
        self._peers: list[PeerMetrics] = []

    def add_peer(self, address: str) -> PeerMetrics:
        self._peers.append(PeerMetrics(address))
        return self._peers[-1]

    def drop_peer(self, address: str) -> None:
        """Nothing more is told of it."""
        self._peers = [peer for peer in self._peers if peer.address != address]

    def observe_ttft(self, parts: Mapping[str, float]) -> None:
        """A first token is on its way: what it has waited for (``TTFT_PARTS``), in seconds."""
        for part, seconds in parts.items():
            self._ttft.observe(part, seconds)

    def count_read(self, read: ReadEnded) -> None:
        """One has ended, whoever waited for it. Reads from a life before a peer's newest one are nobody's."""
        for peer in self._peers:
            if peer.epoch == read.epoch:
                peer.count(read)
                if read.num_corrupt:
                    _log.warning("KV from prefill node %s is corrupt: %s", peer.address, read.error)

    def collect(self) -> Iterator[Metric]:
        """All of them, for Prometheus."""
        for name, documentation in COUNTERS.items():
            yield CounterMetricFamily(name, documentation, self.counters[name])
        for histogram in (self.exposed, self.first_step, self._ttft):
            yield from histogram.collect()
        for name, documentation in PEER_COUNTERS.items():
            family = CounterMetricFamily(name, documentation, labels=["peer"])
            for peer in self._peers:
                family.add_metric([peer.address], peer.counters[name])
            yield family
        connected = GaugeMetricFamily("pdserve_peer_connected", "Whether it is.", labels=["peer", "transport"])
        for peer in self._peers:
            connected.add_metric([peer.address, peer.transport or "none"], float(bool(peer.transport)))
        yield connected


def too_slow(connection: Connected, peer: str, required: str) -> str:
    """Why a connection is not used under ``--require-transport``; "" if it is."""
    if not required or connection.meets(required):
        return ""
    remedy = (
        f"UCX can use {connection.lanes}; look at UCX_TLS and UCX_NET_DEVICES here and at the peer, and at what "
        "`ucx_info -d` lists there"
        if connection.lanes
        else "UCX's log tells, but UCX_LOG_LEVEL or UCX_LOG_FILE is set: unset them"
    )
    return f"the transport to {peer} is {connection.transport}, --require-transport asks for {required}: {remedy}"
