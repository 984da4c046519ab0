"""What two answers of a node's Status say together: rates. Pure; names are those of docs/metrics.md."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from math import inf

import msgspec

from pdserve.live import LiveHandoffs, LiveLink, Measured, Quantiles
from pdserve.metrics import labels_of, quantile
from pdserve.pb import pdserve_pb2 as pb

_WINDOW = 10.0  # seconds that rates are of, where answers come each second
_MINUTE = 60.0

_EXPOSED = "pdserve_handoff_exposed_seconds_bucket"
_PLAIN = {
    f"pdserve_{name}_total": name
    for name in (
        *("admitted_prompt_tokens", "prefix_cached_tokens", "sampled_tokens"),
        *("handoffs", "handoff_failures", "handoff_recomputes", "local_prefills"),
    )
}
_PEER = {f"pdserve_kv_read_{name}_total": name for name in ("bytes", "seconds", "failures")}
_CONNECTED = "pdserve_peer_connected"
NAMES = frozenset({*_PLAIN, *_PEER, _CONNECTED, _EXPOSED.removesuffix("_bucket")})  # all that is looked at


class PeerCounters(msgspec.Struct):
    """Of a decode node: what it has read from a prefill node."""

    bytes: float = 0.0
    seconds: float = 0.0
    failures: float = 0.0
    transport: str = "none"


class Answer(msgspec.Struct, frozen=True):
    """What a node has said at a time, in seconds; all counted since its ``epoch`` began."""

    at: float
    epoch: str
    leased_blocks: int
    counters: Mapping[str, float]
    exposed: Mapping[float, float]  # of handoffs, how many took so many seconds at most
    peers: Mapping[str, PeerCounters]  # by address


def read_answer(at: float, epoch: str, status: pb.NodeStatus) -> Answer:
    counters = dict.fromkeys(_PLAIN.values(), 0.0)
    exposed: dict[float, float] = {}
    peers: dict[str, PeerCounters] = {}
    for key, value in status.counters.items():
        name, _, labels = key.partition("{")
        if name in _PLAIN:
            counters[_PLAIN[name]] = value
        elif name == _EXPOSED:
            exposed[float(labels_of(labels)["le"])] = value
        elif name in _PEER:
            setattr(peers.setdefault(labels_of(labels)["peer"], PeerCounters()), _PEER[name], value)
        elif name == _CONNECTED and value:
            found = labels_of(labels)
            peers.setdefault(found["peer"], PeerCounters()).transport = found["transport"]
    return Answer(at, epoch, status.leased_blocks, counters, exposed, peers)


class Answers:
    """Of one node, through one of its lives at a time."""

    def __init__(self) -> None:
        self._answers: deque[Answer] = deque()

    def add(self, answer: Answer) -> Mapping[float, float]:
        """Returns the handoffs, by the most seconds that they took, that have come since the last answer."""
        if self._answers and self._answers[-1].epoch != answer.epoch:
            self._answers.clear()
        before = self._answers[-1].exposed if self._answers else answer.exposed
        self._answers.append(answer)
        while len(self._answers) > 2 and answer.at - self._answers[0].at > _WINDOW:
            self._answers.popleft()
        return {bound: count - before.get(bound, 0.0) for bound, count in answer.exposed.items()}

    @property
    def known(self) -> bool:
        """Whether there are rates."""
        return len(self._answers) > 1

    def rate(self, counter: str) -> float:
        then, now = self._answers[0], self._answers[-1]
        return max(0.0, now.counters[counter] - then.counters[counter]) / (now.at - then.at)

    def measured(self) -> Measured:
        prompts = self.rate("admitted_prompt_tokens")
        return Measured(
            leased_blocks=self._answers[-1].leased_blocks,
            prompt_token_rate=prompts,
            output_token_rate=self.rate("sampled_tokens"),
            cached_share=min(1.0, self.rate("prefix_cached_tokens") / prompts) if prompts else None,
        )

    def links(self, decode: str, names: Mapping[str, str]) -> list[LiveLink]:
        """From each peer to ``decode``; ``names`` are those of prefill nodes, by address."""
        then, now = self._answers[0], self._answers[-1]
        passed = now.at - then.at
        found: list[LiveLink] = []
        for address, peer in now.peers.items():
            before = then.peers.get(address, PeerCounters())
            num_bytes, seconds = peer.bytes - before.bytes, peer.seconds - before.seconds
            found.append(
                LiveLink(
                    prefill=names.get(address, address),
                    decode=decode,
                    transport=peer.transport,
                    byte_rate=max(0.0, num_bytes) / passed,
                    speed=num_bytes / seconds if num_bytes > 0 and seconds > 0 else None,
                    read_failure_rate=max(0.0, peer.failures - before.failures) / passed,
                )
            )
        return found


class Exposed:
    """What handoffs have cost in the last minute, of all decode nodes together."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, Mapping[float, float]]] = deque()  # when, and how many by the most seconds

    def add(self, at: float, counts: Mapping[float, float]) -> None:
        """Counts are cumulative, as Prometheus has them."""
        if any(counts.values()):
            self._counts.append((at, counts))
        while self._counts and at - self._counts[0][0] > _MINUTE:
            self._counts.popleft()

    def quantiles(self) -> Quantiles:
        totals: Counter[float] = Counter()
        for _, counts in self._counts:
            totals.update(counts)
        bounds = sorted(totals)
        each = [totals[high] - totals[low] for low, high in zip([-inf, *bounds], bounds, strict=False)]
        finite = [bound for bound in bounds if bound < inf]
        return Quantiles(quantile(finite, each, 0.5), quantile(finite, each, 0.99)) if finite else Quantiles()


def handoffs_of(decodes: Sequence[Answers], links: Sequence[LiveLink], exposed: Quantiles) -> LiveHandoffs:
    """Of decode nodes of which rates are known."""

    def rate(counter: str) -> float:
        return sum(answers.rate(counter) for answers in decodes)

    return LiveHandoffs(
        rate=rate("handoffs"),
        failure_rate=rate("handoff_failures"),
        recompute_rate=rate("handoff_recomputes"),
        local_rate=rate("local_prefills"),
        byte_rate=sum(link.byte_rate for link in links),
        exposed=exposed,
    )
