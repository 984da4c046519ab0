"""Rates between two Status responses of a node. Pure; counter names are those of docs/metrics.md."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

import msgspec

from pdserve.metrics import labels_of, quantile
from pdserve.pb import pdserve_pb2 as pb
from router.dashboard.live import LiveConnection, LiveHandoffs, LiveNodeStats, Quantiles

_WINDOW = 10.0  # seconds of a rate, with a sample per second
_MINUTE = 60.0

_EXPOSED = "pdserve_handoff_exposed_seconds_bucket"
_NODE_COUNTERS = {
    f"pdserve_{name}_total": name
    for name in (
        "admitted_prompt_tokens",
        "prefix_cached_tokens",
        "host_kv_hit_tokens",
        "pulled_tokens",
        "sampled_tokens",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "handoffs",
        "handoff_failures",
        "handoff_recomputes",
        "local_prefills",
        "images_encoded",
        "image_cache_hits",
    )
}
_PEER_COUNTERS = {f"pdserve_kv_read_{name}_total": name for name in ("bytes", "seconds", "failures")}
_CONNECTED = "pdserve_peer_connected"
NAMES = frozenset({*_NODE_COUNTERS, *_PEER_COUNTERS, _CONNECTED, _EXPOSED.removesuffix("_bucket")})  # all in use


class PeerCounters(msgspec.Struct):
    """KV reads of a decode node from one prefill node."""

    bytes: float = 0.0
    seconds: float = 0.0
    failures: float = 0.0
    transport: str = "none"


class StatusSample(msgspec.Struct, frozen=True):
    """A node's Status at a time in seconds; counters since the start of its ``epoch``."""

    at: float
    epoch: str
    leased_blocks: int
    counters: Mapping[str, float]
    exposed: Mapping[float, float]  # handoffs by upper bound of their exposed seconds, cumulative
    peers: Mapping[str, PeerCounters]  # by address


def parse_status(at: float, epoch: str, status: pb.NodeStatus) -> StatusSample:
    counters = dict.fromkeys(_NODE_COUNTERS.values(), 0.0)
    exposed: dict[float, float] = {}
    peers: dict[str, PeerCounters] = {}
    for key, value in status.counters.items():
        name, _, labels = key.partition("{")
        if name in _NODE_COUNTERS:
            counters[_NODE_COUNTERS[name]] = value
        elif name == _EXPOSED:
            exposed[float(labels_of(labels)["le"])] = value
        elif name in _PEER_COUNTERS:
            setattr(peers.setdefault(labels_of(labels)["peer"], PeerCounters()), _PEER_COUNTERS[name], value)
        elif name == _CONNECTED and value:
            named = labels_of(labels)
            peers.setdefault(named["peer"], PeerCounters()).transport = named["transport"]
    return StatusSample(at, epoch, status.leased_blocks, counters, exposed, peers)


class NodeHistory:
    """The latest samples of one node, all of one epoch."""

    def __init__(self) -> None:
        self._samples: deque[StatusSample] = deque()

    def add(self, sample: StatusSample) -> Mapping[float, float]:
        """Return the handoffs since the last sample, by upper bound of their exposed seconds."""
        if self._samples and self._samples[-1].epoch != sample.epoch:
            self._samples.clear()
        before = self._samples[-1].exposed if self._samples else sample.exposed
        self._samples.append(sample)
        while len(self._samples) > 2 and sample.at - self._samples[0].at > _WINDOW:
            self._samples.popleft()
        return {bound: count - before.get(bound, 0.0) for bound, count in sample.exposed.items()}

    @property
    def has_rates(self) -> bool:
        return len(self._samples) > 1

    def rate(self, counter: str) -> float:
        first = self._samples[0]
        last = self._samples[-1]
        return max(0.0, last.counters[counter] - first.counters[counter]) / (last.at - first.at)

    def total(self, counter: str) -> float:
        """Return the counter since the start of the node."""
        return self._samples[-1].counters[counter]

    def stats(self) -> LiveNodeStats:
        prompts = self.rate("admitted_prompt_tokens")
        drafted, drafts, accepted = (
            self.rate(f"spec_decode_num_{counted}") for counted in ("drafts", "draft_tokens", "accepted_tokens")
        )
        encoded = self.rate("images_encoded")
        images = encoded + self.rate("image_cache_hits")
        return LiveNodeStats(
            leased_blocks=self._samples[-1].leased_blocks,
            prompt_token_rate=prompts,
            output_token_rate=self.rate("sampled_tokens"),
            cached_share=min(1.0, self.rate("prefix_cached_tokens") / prompts) if prompts else None,
            host_share=min(1.0, self.rate("host_kv_hit_tokens") / prompts) if prompts else None,
            pulled_share=min(1.0, self.rate("pulled_tokens") / prompts) if prompts else None,
            tokens_per_drafted_decode=1.0 + accepted / drafted if drafted else None,
            acceptance=accepted / drafts if drafts else None,
            image_rate=images,
            encoded_share=encoded / images if images else None,
        )

    def connections(self, reader: str, names: Mapping[str, str]) -> list[LiveConnection]:
        """Connections of the node ``reader`` to those that it reads from; ``names`` are names of nodes by address."""
        first = self._samples[0]
        last = self._samples[-1]
        elapsed = last.at - first.at
        connections: list[LiveConnection] = []
        for address, peer in last.peers.items():
            before = first.peers.get(address, PeerCounters())
            num_bytes = peer.bytes - before.bytes
            seconds = peer.seconds - before.seconds
            connections.append(
                LiveConnection(
                    prefill=names.get(address, address),
                    decode=reader,
                    transport=peer.transport,
                    byte_rate=max(0.0, num_bytes) / elapsed,
                    throughput=num_bytes / seconds if num_bytes > 0 and seconds > 0 else None,
                    read_failure_rate=max(0.0, peer.failures - before.failures) / elapsed,
                )
            )
        return connections


class ExposedLatency:
    """Exposed seconds of all handoffs in the last minute."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, Mapping[float, float]]] = deque()  # time; handoffs by upper bound

    def add(self, at: float, counts: Mapping[float, float]) -> None:
        """``counts`` are cumulative over the bounds, like Prometheus buckets."""
        if any(counts.values()):
            self._counts.append((at, counts))
        while self._counts and at - self._counts[0][0] > _MINUTE:
            self._counts.popleft()

    def quantiles(self) -> Quantiles:
        totals: Counter[float] = Counter()
        for _, counts in self._counts:
            totals.update(counts)
        bounds = sorted(totals)
        per_bucket = [totals[high] - totals[low] for low, high in zip([-inf, *bounds], bounds, strict=False)]
        finite = [bound for bound in bounds if bound < inf]
        return Quantiles(*(quantile(finite, per_bucket, share) for share in (0.5, 0.99))) if finite else Quantiles()


class Reader(NamedTuple):
    """A node that may read from others; its history has rates."""

    role: str
    name: str
    history: NodeHistory


def live_reads(
    readers: Iterable[Reader], names: Mapping[str, str], exposed: Quantiles
) -> tuple[LiveHandoffs | None, list[LiveConnection]]:
    """Return the handoffs of all nodes that decode, None without any, and the connections: broken ones, then busy ones.

    ``names`` are names of nodes by address. Connections of prefill nodes are there while these pull.
    """
    decodes = list[NodeHistory]()
    connections = list[LiveConnection]()
    pulling = list[LiveConnection]()
    for role, name, history in readers:
        own = history.connections(name, names)
        if role == "prefill":
            pulling += [connection for connection in own if connection.byte_rate]
        else:
            decodes.append(history)
            connections += own
    handoffs = sum_handoffs(decodes, connections, exposed) if decodes else None
    connections += pulling
    connections.sort(
        key=lambda connection: (
            connection.transport != "none",
            -connection.byte_rate,
            connection.prefill,
            connection.decode,
        )
    )
    return handoffs, connections


def sum_handoffs(
    decodes: Sequence[NodeHistory], connections: Sequence[LiveConnection], exposed: Quantiles
) -> LiveHandoffs:
    """Handoffs of all decode nodes; each history must have rates."""

    def rate(counter: str) -> float:
        return sum(history.rate(counter) for history in decodes)

    return LiveHandoffs(
        total=int(sum(history.total("handoffs") for history in decodes)),
        rate=rate("handoffs"),
        failure_rate=rate("handoff_failures"),
        recompute_rate=rate("handoff_recomputes"),
        local_rate=rate("local_prefills"),
        byte_rate=sum(connection.byte_rate for connection in connections),
        exposed=exposed,
    )
