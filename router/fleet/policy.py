"""Which nodes serve a request: pure functions of a snapshot of the fleet and of what the request needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple, TypeVar

import msgspec

from pdserve import request_cost as cost
from pdserve.errors import Overloaded
from pdserve.request_cost import RequestLoad
from pdserve.throughput import LinearCost, Throughput

_SLACK, _SLACK_SHARE = 1e-3, 0.01  # seconds, and a share: costs that differ by less are taken to be equal


class NodeView(msgspec.Struct, frozen=True):
    """A node as the router sees it. ``node_id`` is unique.

    ``in_flight`` counts this router's requests there; on P, those still in prefill.
    """

    node_id: str
    role: str  # "prefill" or "decode"
    model: str
    ready: bool
    compat_hash: str = ""
    version: str = ""
    connected_peers: frozenset[str] = frozenset()  # ids of the P that a D can read from
    in_flight: int = 0
    load: RequestLoad = RequestLoad()  # of all routers' requests, as the node told, and what it has not told of yet
    throughput: Throughput = Throughput()

    def reads_from(self, prefill: NodeView) -> bool:
        """Whether this D can take over what that P computes."""
        return (
            prefill.node_id in self.connected_peers
            and prefill.compat_hash == self.compat_hash
            and prefill.version == self.version
        )


class FleetSnapshot(msgspec.Struct, frozen=True):
    """``turn`` counts the choices made so far, from some number on; ties go round by it.

    ``typical`` is what a node that has not measured something is taken to be like: as the others are, where it is None.
    """

    model: str
    nodes: tuple[NodeView, ...]
    turn: int = 0
    typical: Throughput | None = None

    def among(self, accepts: Callable[[NodeView], bool]) -> FleetSnapshot:
        """The same with only those decode nodes that are accepted."""
        nodes = tuple(node for node in self.nodes if node.role != "decode" or accepts(node))
        return msgspec.structs.replace(self, nodes=nodes)

    def without(self, role: str) -> FleetSnapshot:
        return msgspec.structs.replace(self, nodes=tuple(node for node in self.nodes if node.role != role))

    def usable(self, role: str) -> list[NodeView]:
        return [node for node in self.nodes if node.role == role and node.ready and node.model == self.model]


class PolicyRequest(msgspec.Struct, frozen=True):
    """A prompt, and how many of its leading tokens each node has in its cache, by node id; none where it is missing."""

    num_tokens: int
    cached: Mapping[str, int] = {}

    def uncached(self, node_id: str) -> int:
        """Tokens of the prompt that are to be computed there; one at least."""
        return max(1, self.num_tokens - self.cached.get(node_id, 0))


class NodeChoice(msgspec.Struct, frozen=True):
    """Node ids. Without ``prefill`` the decode node computes the prompt itself."""

    decode: str
    prefill: str | None


T = TypeVar("T")
Policy = Callable[[FleetSnapshot, PolicyRequest], NodeChoice]
"""Raises Overloaded when there is no ready D of the model."""


def round_robin(snapshot: FleetSnapshot, ask: PolicyRequest) -> NodeChoice:
    """One after the other, whatever they do."""
    decode = _in_turn(_decodes(snapshot), snapshot.turn)
    prefills = [node for node in snapshot.usable("prefill") if decode.reads_from(node)]
    return NodeChoice(decode.node_id, _in_turn(prefills, snapshot.turn).node_id if prefills else None)


def least_loaded(snapshot: FleetSnapshot, ask: PolicyRequest) -> NodeChoice:
    """The D with the fewest requests, then the P with the fewest that it can read from."""
    decode = _in_turn(_fewest(_decodes(snapshot)), snapshot.turn)
    prefills = [node for node in snapshot.usable("prefill") if decode.reads_from(node)]
    return NodeChoice(decode.node_id, _in_turn(_fewest(prefills), snapshot.turn).node_id if prefills else None)


def prefix_aware(snapshot: FleetSnapshot, ask: PolicyRequest) -> NodeChoice:
    """The pair, or the D alone, that costs the least by pdserve/request_cost.py."""
    decodes, prefills = _decodes(snapshot), snapshot.usable("prefill")
    typical = snapshot.typical or typical_throughput([*decodes, *prefills])
    ranked = _ranked(prefills, ask, typical, snapshot.turn)
    options: list[_Option] = []
    for decode in decodes:
        load, throughput, lacking = decode.load, _filled(decode.throughput, typical), ask.uncached(decode.node_id)
        decoding = cost.of_decoding(load, throughput, ask.num_tokens)
        options.append(_Option(decoding + cost.of_local_prompt(load, throughput, lacking), decode))
        for prefill in ranked:
            if decode.reads_from(prefill.node):
                seconds = decoding + prefill.seconds + cost.of_handing_over(throughput, lacking)
                options.append(_Option(seconds, decode, prefill.node))
                break
    best = _in_turn(_cheapest(options), snapshot.turn)
    return NodeChoice(best.node.node_id, None if best.prefill is None else best.prefill.node_id)


PREFIX_AWARE = "prefix-aware"  # the only one that looks at what is cached
POLICIES: dict[str, Policy] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    PREFIX_AWARE: prefix_aware,
}


def no_decode_node(snapshot: FleetSnapshot) -> Overloaded:
    """The error for a fleet that cannot serve now; it names the models there are, where it is only the name."""
    others = sorted({node.model for node in snapshot.nodes if node.role == "decode" and node.ready})
    remedy = f"the ready ones serve {', '.join(map(repr, others))}" if others else "try again shortly"
    return Overloaded(f"no decode node of model {snapshot.model!r} is ready; {remedy}")


def _decodes(snapshot: FleetSnapshot) -> list[NodeView]:
    nodes = snapshot.usable("decode")
    if not nodes:
        raise no_decode_node(snapshot)
    return nodes


def _in_turn(tied: Sequence[T], turn: int) -> T:
    return tied[turn % len(tied)]


def _fewest(nodes: list[NodeView]) -> list[NodeView]:
    """Those with the fewest requests, of any router."""
    requests = [max(node.in_flight, node.load.requests) for node in nodes]
    fewest = min(requests, default=0)
    return [node for node, count in zip(nodes, requests, strict=True) if count == fewest]


class _Option(NamedTuple):
    seconds: float
    node: NodeView
    prefill: NodeView | None = None


def _cheapest(options: Sequence[_Option]) -> list[_Option]:
    """Those that are as good as the best: routers that do not know of each other do not all choose the same."""
    limit = min(option.seconds for option in options) * (1.0 + _SLACK_SHARE) + _SLACK
    return [option for option in options if option.seconds <= limit]


def _ranked(prefills: list[NodeView], ask: PolicyRequest, typical: Throughput, turn: int) -> list[_Option]:
    """What the prompt costs on each P, the cheapest first; those that are as good as it go round."""
    options = []
    for node in prefills:
        throughput = _filled(node.throughput, typical)
        seconds = cost.of_remote_prompt(node.load, throughput, ask.num_tokens, ask.uncached(node.node_id))
        options.append(_Option(seconds, node))
    if not options:
        return []
    options.sort(key=lambda option: option.seconds)
    tied = len(_cheapest(options))
    return options[turn % tied : tied] + options[: turn % tied] + options[tied:]


def typical_throughput(nodes: Sequence[NodeView]) -> Throughput:
    """The mean of what nodes have measured; what none has is a guess."""
    lines = []
    for name in Throughput.__struct_fields__:
        known = [line for node in nodes if (line := getattr(node.throughput, name))]
        mean = LinearCost(fmean(line.base for line in known), fmean(line.slope for line in known)) if known else None
        lines.append(mean or getattr(cost.TYPICAL, name))
    return Throughput(*lines)


def _filled(measured: Throughput, typical: Throughput) -> Throughput:
    """Fill the costs that a node has not measured with the typical ones."""
    if measured.prompt.base and measured.decode.base and measured.read.base:
        return measured
    return Throughput(
        measured.prompt or typical.prompt, measured.decode or typical.decode, measured.read or typical.read
    )
