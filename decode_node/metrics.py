"""What a decode node counts. Names, units and meanings: docs/metrics.md."""

from __future__ import annotations

import logging

from engine.messages import ReadEnded
from pdserve.metrics import Histogram, series
from pdserve.transports import Connected

_log = logging.getLogger(__name__)

COUNTERS = (
    "pdserve_requests_total",
    "pdserve_request_failures_total",
    "pdserve_local_prefills_total",
    "pdserve_handoffs_total",
    "pdserve_handoff_failures_total",
    "pdserve_handoff_recomputes_total",
    "pdserve_handoff_recomputed_tokens_total",
)
PEER_COUNTERS = (
    "pdserve_kv_reads_total",
    "pdserve_kv_read_failures_total",
    "pdserve_kv_read_bytes_total",
    "pdserve_kv_read_descriptors_total",
    "pdserve_kv_read_seconds_total",
    "pdserve_kv_checksum_failures_total",
    "pdserve_peer_losses_total",
)
_EXPOSED_BOUNDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.5, 10.0)  # seconds


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

    def export(self) -> dict[str, float]:
        found = {series(name, peer=self.address): value for name, value in self.counters.items()}
        connected = series("pdserve_peer_connected", peer=self.address, transport=self.transport or "none")
        return {**found, connected: float(bool(self.transport))}


class Metrics:
    """``counters`` are those without labels, by name; ``exposed`` is observed once per handoff that succeeds."""

    def __init__(self) -> None:
        self.counters = dict.fromkeys(COUNTERS, 0.0)
        self.exposed = Histogram("pdserve_handoff_exposed_seconds", _EXPOSED_BOUNDS)
        self._peers: list[PeerMetrics] = []

    def add_peer(self, address: str) -> PeerMetrics:
        self._peers.append(PeerMetrics(address))
        return self._peers[-1]

    def drop_peer(self, address: str) -> None:
        """Nothing more is told of it."""
        self._peers = [peer for peer in self._peers if peer.address != address]

    def count_read(self, read: ReadEnded) -> None:
        """One has ended, whoever waited for it. Reads from a life before a peer's newest one are nobody's."""
        for peer in self._peers:
            if peer.epoch == read.epoch:
                peer.count(read)
                if read.num_corrupt:
                    _log.warning("KV from prefill node %s is corrupt: %s", peer.address, read.error)

    def export(self) -> dict[str, float]:
        found = {**self.counters, **self.exposed.export()}
        for peer in self._peers:
            found |= peer.export()
        return found


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
