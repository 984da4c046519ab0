"""Load-balancing policies: pure functions from a snapshot of the fleet and a request to the nodes that serve it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from heapq import nsmallest
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from pdserve import request_cost as cost
from pdserve.adapters.adapter import NO_ADAPTER
from pdserve.config.compatibility import PROTOCOL_VERSION
from pdserve.errors import Overloaded
from pdserve.images import ImageInput
from pdserve.request_cost import LinearCost, OutOfRange, PromptTimes, RequestLoad, StepCosts
from router.fleet.image_index import NO_IMAGES, ImageCosts, PromptImages

_MOST_SOURCES = 4  # peers that are considered for a pull
_MOST_OPTIONS = 6  # options listed in a trace
# Two costs within these seconds, or within this share of the cost, count as equal.
_SLACK = 1e-3
_SLACK_SHARE = 0.01

GENERATE = "generate"
EMBED = "embed"
CLASSIFY = "classify"
TASKS = (GENERATE, EMBED, CLASSIFY)  # tasks of nodes
POOLING = (EMBED, CLASSIFY)
BOTH = "both"  # role of a node that prefills and decodes


class NodeView(msgspec.Struct, frozen=True):
    """A node as this router knows it. ``node_id`` is unique."""

    node_id: str
    role: str  # "prefill", "decode" or "both"
    model: str
    ready: bool
    compat_hash: str = ""
    protocol: int = PROTOCOL_VERSION
    connected_peers: frozenset[str] = frozenset()  # ids of the nodes that it can read from
    in_flight: int = 0  # requests of this router; on P, those still in prefill
    stalled: bool = False  # a step may never end: chosen only if all nodes are stalled
    load: RequestLoad = RequestLoad()  # requests of all routers: as reported, and as sent since the report
    costs: StepCosts = StepCosts()
    task: str = GENERATE
    hands_off_all: bool = False  # prompts of any length and cost
    has_suspect: bool = False  # a request of this router is on trial there
    weights: str = ""  # short name of the weights: equal for nodes with equal weights
    max_model_len: float = math.inf  # tokens of the longest request that it takes
    images: ImageInput | None = None  # images that it encodes; None: it encodes none
    continued_images: ImageInput | None = None  # images of prompts that it continues, but does not encode
    image_costs: ImageCosts | None = None  # beside ``images``
    adapters: frozenset[str] = frozenset((NO_ADAPTER,))  # digests of the adapters that its requests may use

    @property
    def decodes(self) -> bool:
        return self.role in ("decode", BOTH)

    @property
    def prefills(self) -> bool:
        """Whether the node computes prompts for other nodes."""
        return self.role in ("prefill", BOTH)

    @property
    def serves(self) -> bool:
        """Whether the node takes requests from routers: one that decodes, or a prefill node that pools."""
        return self.ready and self.decodes == (self.task == GENERATE)

    def reads_from(self, source: NodeView) -> bool:
        """Return whether this node can read KV of another one: prompts of P, cached prefixes of any node."""
        return source.node_id in self.connected_peers and self.may_read_from(source)

    def may_read_from(self, source: NodeView) -> bool:
        """Return whether a connection to that node would suffice for ``reads_from``."""
        return source.node_id != self.node_id and self.is_compatible(source)

    def is_compatible(self, node: NodeView) -> bool:
        """Return whether the nodes can exchange KV and continue each other's answers."""
        return node.compat_hash == self.compat_hash and node.protocol == self.protocol


class FleetSnapshot(msgspec.Struct, frozen=True):
    """``counter`` counts placements: ties are broken round-robin by it.

    ``typical`` fills costs that a node has not measured; None: the mean of the model's nodes.
    """

    model: str
    nodes: tuple[NodeView, ...]
    counter: int = 0
    typical: StepCosts | None = None

    def usable(self, role: str) -> list[NodeView]:
        roles = (role, BOTH)
        ready = [node for node in self.nodes if node.role in roles and node.ready and node.model == self.model]
        return [node for node in ready if not node.stalled] or ready


class RoutingHint(msgspec.Struct, frozen=True):
    """Wishes of a trusted scheduler in front of this router."""

    prefill: tuple[str, ...] = ()  # addresses, or hosts, of P of which one computes the prompt; (): any
    ttft: float = math.inf  # objective for the first token, in seconds
    tpot: float = math.inf  # objective for the time between two tokens, in seconds


NO_HINT = RoutingHint()


class PolicyRequest(msgspec.Struct, frozen=True):
    """A prompt; ``cached`` are its leading tokens in each node's prefix cache, by node id, zeros left out.

    Without ``may_hand_off`` the decode node computes it. ``prefills`` are the ids of P of which one should compute it;
    None: any. The objectives are those of RoutingHint.
    """

    num_tokens: int
    cached: Mapping[str, int] = {}
    may_hand_off: bool = True
    prefills: frozenset[str] | None = None
    ttft: float = math.inf
    tpot: float = math.inf
    images: PromptImages = NO_IMAGES

    def uncached(self, node_id: str) -> int:
        """Prompt tokens to compute on a node; at least one."""
        return max(1, self.num_tokens - self.cached.get(node_id, 0))

    def encoding(self, node: NodeView, begin: int, end: int | None = None) -> int:
        """Work of encoding images if a node computes the tokens ``begin`` … ``end`` - 1, as prompt tokens."""
        return self.images.work(node.node_id, node.image_costs, begin, self.num_tokens if end is None else end)

    def to_compute(self, node: NodeView, pulled: int = 0) -> int:
        """Prompt tokens that a node computes, with the work of encoding. It pulls the first ``pulled`` ones."""
        computed = min(max(self.cached.get(node.node_id, 0), pulled), self.num_tokens - 1)
        return self.num_tokens - computed + self.encoding(node, computed)


class Option(NamedTuple):
    """A way to serve a request: the ids of its nodes, and its cost in seconds of TTFT."""

    seconds: float
    decode: str
    prefill: str | None
    source: str | None

    def __str__(self) -> str:
        prefill = self.prefill and f", prefill on {self.prefill}"
        source = self.source and f", pulled from {self.source}"
        return f"{self.seconds:.4f} s: decode on {self.decode}{prefill or ''}{source or ''}"


class Placement(msgspec.Struct, frozen=True):
    """The ids of a request's nodes. Without ``prefill`` the decode node computes the prompt.

    The node that computes the prompt pulls the first ``source_tokens`` tokens from ``source``, except those it has.
    """

    decode: str
    prefill: str | None
    source: str | None = None
    source_tokens: int = 0


Policy = Callable[[FleetSnapshot, PolicyRequest], Placement]
"""Raises Overloaded when no D of the model is ready."""


def round_robin(snapshot: FleetSnapshot, request: PolicyRequest) -> Placement:
    """Cycle through the D, and through the P that D can read from."""
    return _cycle(snapshot, request, _decode_nodes(snapshot), lambda prefills: prefills)


def least_loaded(snapshot: FleetSnapshot, request: PolicyRequest) -> Placement:
    """Choose the D with the fewest requests, then the P with the fewest that D can read from."""
    return _cycle(snapshot, request, _fewest_requests(_decode_nodes(snapshot)), _fewest_requests)


def prefix_aware(snapshot: FleetSnapshot, request: PolicyRequest) -> Placement:
    """Choose the pair, or the D alone, of the lowest cost by pdserve/request_cost.py.

    Those that are predicted to meet the request's objectives come first, or the ones that miss them by the least. Where
    no D has a price, load alone decides.
    """
    candidates = _candidates(snapshot, request)
    if not candidates:
        return least_loaded(snapshot, request)
    least = min(candidate.excess for candidate in candidates)
    candidates = [candidate for candidate in candidates if candidate.excess == least]
    cheapest = _cheapest(candidates)
    cheapest = [candidate for candidate in cheapest if candidate.source is None] or cheapest
    best = cheapest[snapshot.counter % len(cheapest)]
    prefill = None if best.prefill is None else best.prefill.node_id
    if best.source is None:
        return Placement(best.node.node_id, prefill)
    return Placement(best.node.node_id, prefill, best.source.node.node_id, best.source.num_tokens)


def compared_options(snapshot: FleetSnapshot, request: PolicyRequest, chosen: Placement) -> list[Option]:
    """Return options that ``prefix_aware`` has compared: the choice, others of the same D, then the cheapest ones.

    Each that pulls is there also without its pull.
    """
    options = []
    for way in _candidates(snapshot, request):
        prefill = None if way.prefill is None else way.prefill.node_id
        if way.source is not None:
            options.append(Option(way.seconds, way.node.node_id, prefill, way.source.node.node_id))
        options.append(Option(way.seconds + way.saved, way.node.node_id, prefill, None))

    def rank(option: Option) -> tuple[bool, bool, bool, float]:
        other_decode = option.decode != chosen.decode
        other_prefill = option.prefill != chosen.prefill
        other_nodes = other_decode or other_prefill
        return other_nodes or option.source != chosen.source, other_nodes, other_decode, option.seconds

    return nsmallest(_MOST_OPTIONS, options, key=rank)


def _candidates(snapshot: FleetSnapshot, request: PolicyRequest) -> list[_Candidate]:
    """Return for each D with a price the ways to compute the prompt there, or on the best P that it reads from."""
    usable = {node.node_id for node in snapshot.usable("decode")}
    snapshot, typical = priced(snapshot)
    decodes = [node for node in snapshot.usable("decode") if node.node_id in usable]
    sources = _sources(snapshot, request)
    ranked = _rank_prefills(_prefill_nodes(snapshot, request), request, snapshot.counter, sources)
    shares = prompt_shares(snapshot, typical)
    candidates: list[_Candidate] = []
    for decode in decodes:
        load = decode.load
        costs = decode.costs
        uncached = request.uncached(decode.node_id)
        decoding = cost.decode_cost(load, costs, request.num_tokens, shares[decode.node_id])
        per_token = cost.time_per_token(costs.decode, load.to_decode + 1, shares[decode.node_id])
        peer = next((prefill for prefill in ranked if decode.reads_from(prefill.node)), None)
        if peer is None or not (decode.hands_off_all or request.prefills):
            prompt, source, saved = _with_pull(decode, request, sources, partial(cost.prompt_times, load, costs))
            excess = _excess(request, prompt.first_token, per_token)
            candidates.append(_Candidate(decoding + prompt.cost, decode, excess=excess, source=source, saved=saved))
        if peer is not None:
            seconds = decoding + peer.seconds + cost.handoff_cost(load, costs, uncached)
            excess = _excess(request, peer.first_token, per_token)
            way = _Candidate(seconds, decode, peer.node, excess=excess, source=peer.source, saved=peer.saved)
            candidates.append(way)
    return candidates


def prompt_shares(snapshot: FleetSnapshot, typical: StepCosts) -> dict[str, float]:
    """Predict the share of time that each node that decodes will spend on prompts, by node id.

    Prompts settle on prefill nodes, then on nodes of both roles in the order of their ids, which all routers know. The
    shares of fleets without nodes of both roles are those reported.
    """
    decodes = snapshot.usable("decode")
    elastic = sorted(node.node_id for node in decodes if node.role == BOTH)
    if len(elastic) < 2:
        return {node.node_id: node.load.prompt_share for node in decodes}
    fixed = [node for node in snapshot.usable("prefill") if node.role != BOTH]
    streams = sum(node.load.to_decode for node in decodes)
    life = cost.stream_life(typical.decode, streams / len(decodes))
    work = sum(_prompt_work(node.load, node.costs.prompt or typical.prompt, life) for node in (*fixed, *decodes))
    work = max(0.0, work - len(fixed))
    others = [node.node_id for node in decodes if node.role != BOTH]
    target = max(node.load.itl_target for node in decodes)
    shares = cost.settled_shares(work, streams, len(decodes), typical, target)
    return dict(zip([*elastic, *others], shares, strict=True))


def _prompt_work(load: RequestLoad, prompt: LinearCost, life: float) -> float:
    """Return the share of a node's time that its prompts need: a node that lacks time has a growing queue of them.

    ``life``: seconds that a stream takes, in which the queue should be computed.
    """
    return load.prompt_share + prompt.slope * load.backlog / life


def pooling_node(
    policy: str,
    snapshot: FleetSnapshot,
    task: str,
    num_tokens: int,
    left: Collection[str] = (),
    weights: str | None = None,
) -> str:
    """Choose the P that pools prompts of ``num_tokens`` together, by id; none of ``left``. Raises Overloaded.

    ``weights`` None: of any weights.
    """
    usable = [node for node in snapshot.usable("prefill") if weights in (None, node.weights)]
    nodes = [node for node in usable if node.task == task and node.node_id not in left]
    if not nodes:
        raise no_serving_node(snapshot, task)
    if policy == PREFIX_AWARE:
        priced_nodes, _ = price(nodes, snapshot.typical or typical_costs(nodes))
        if priced_nodes:
            return _rank_prefills(priced_nodes, PolicyRequest(num_tokens), snapshot.counter)[0].node.node_id
    if policy != ROUND_ROBIN:
        nodes = _fewest_requests(nodes)
    return nodes[snapshot.counter % len(nodes)].node_id


ROUND_ROBIN = "round-robin"
LEAST_LOADED = "least-loaded"
PREFIX_AWARE = "prefix-aware"
POLICIES: dict[str, Policy] = {
    ROUND_ROBIN: round_robin,
    LEAST_LOADED: least_loaded,
    PREFIX_AWARE: prefix_aware,
}
# Policies that read PolicyRequest.cached; the others get it empty.
PREFIX_POLICIES = frozenset({PREFIX_AWARE})


def no_serving_node(snapshot: FleetSnapshot, task: str = GENERATE) -> Overloaded:
    """The error for a model without a ready node of a task; it names the models that have one."""
    others = sorted({node.model for node in snapshot.nodes if node.task == task and node.serves})
    remedy = f"the ready ones serve {', '.join(map(repr, others))}" if others else "try again shortly"
    role = "decode node" if task == GENERATE else f"prefill node with task {task}"
    return Overloaded(f"no {role} of model {snapshot.model!r} is ready; {remedy}")


def _decode_nodes(snapshot: FleetSnapshot) -> list[NodeView]:
    nodes = snapshot.usable("decode")
    if not nodes:
        raise no_serving_node(snapshot)
    return nodes


def _prefill_nodes(snapshot: FleetSnapshot, request: PolicyRequest) -> list[NodeView]:
    if not request.may_hand_off:
        return []
    nodes = snapshot.usable("prefill")
    return nodes if request.prefills is None else [node for node in nodes if node.node_id in request.prefills]


def _excess(request: PolicyRequest, ttft: float, tpot: float) -> float:
    """Return how far predicted times exceed the objectives, in their multiples; 0: they do not."""
    return max(ttft / request.ttft, tpot / request.tpot, 1.0) - 1.0


def _cycle(
    snapshot: FleetSnapshot,
    request: PolicyRequest,
    decodes: list[NodeView],
    best: Callable[[list[NodeView]], list[NodeView]],
) -> Placement:
    decode = decodes[snapshot.counter % len(decodes)]
    prefills = best([node for node in _prefill_nodes(snapshot, request) if decode.reads_from(node)])
    return Placement(decode.node_id, prefills[snapshot.counter % len(prefills)].node_id if prefills else None)


def _fewest_requests(nodes: list[NodeView]) -> list[NodeView]:
    requests = [max(node.in_flight, node.load.requests) for node in nodes]
    fewest = min(requests, default=0)
    return [node for node, count in zip(nodes, requests, strict=True) if count == fewest]


class _Source(NamedTuple):
    """A node whose prefix cache has a part of the prompt."""

    node: NodeView
    num_tokens: int  # leading tokens of the prompt
    wait: float  # seconds until the node answers


class _Candidate(NamedTuple):
    seconds: float
    node: NodeView
    prefill: NodeView | None = None
    first_token: float = 0.0  # seconds until P sends it; only in choices of P
    excess: float = 0.0  # beyond the objectives, in their multiples
    source: _Source | None = None  # peer that the computing node pulls the prefix from
    saved: float = 0.0  # seconds that the pull saves


def _cheapest(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Return the candidates of lowest or equal cost, so that independent routers do not all choose the same node."""
    least = min(candidate.seconds for candidate in candidates)
    limit = least + _SLACK_SHARE * abs(least) + _SLACK
    return [candidate for candidate in candidates if candidate.seconds <= limit]


def _rank_prefills(
    prefills: list[NodeView],
    request: PolicyRequest,
    counter: int,
    sources: Sequence[_Source] = (),
) -> list[_Candidate]:
    """Rank P by the cost of the prompt, the cheapest first; those of equal cost rotate."""
    if not prefills:
        return []
    ranked = []
    for node in prefills:
        times = partial(cost.remote_prompt_times, node.load, node.costs, request.num_tokens)
        prompt, source, saved = _with_pull(node, request, sources, times)
        ranked.append(_Candidate(prompt.cost, node, first_token=prompt.first_token, source=source, saved=saved))
    ranked.sort(key=lambda candidate: candidate.seconds)
    tied = len(_cheapest(ranked))
    first = counter % tied
    return ranked[first:tied] + ranked[:first] + ranked[tied:]


def _sources(snapshot: FleetSnapshot, request: PolicyRequest) -> list[_Source]:
    """Return peers for a pull, the longest prefix first; of equal ones, the fastest to answer first."""
    if not (request.cached and request.may_hand_off):
        return []
    sources = [
        _Source(node, request.cached[node.node_id], cost.answer_wait(node.load, node.costs))
        for node in snapshot.nodes
        if node.node_id in request.cached and node.ready and not node.stalled
    ]
    return sorted(sources, key=lambda source: (-source.num_tokens, source.wait))[:_MOST_SOURCES]


def _with_pull(
    reader: NodeView,
    request: PolicyRequest,
    sources: Sequence[_Source],
    times: Callable[[int], PromptTimes],
) -> tuple[PromptTimes, _Source | None, float]:
    """Return the cost of a prompt on a node, the source of the pull that lowers it most, and by how many seconds.

    ``times`` has the cost by uncached tokens. A pull counts more than its time, so it is chosen where it wins clearly.
    """
    uncached = request.uncached(reader.node_id)
    own = request.num_tokens - uncached  # cached tokens
    best = computed = times(request.to_compute(reader))
    chosen = None
    if not sources:
        return best, None, 0.0
    load = reader.load
    costs = reader.costs
    pace = cost.prompt_pace(load, costs, load.backlog, load.decoding)
    split_block = load.block_size if load.windows == (None,) else 0
    for source in sources:
        cached = source.num_tokens - own
        if cached <= 0 or not reader.reads_from(source.node):
            continue
        plan = cost.plan_pull(costs, cached, wait=source.wait, pace=pace, split_block=split_block)
        if plan is None:
            continue
        encoding = request.encoding(reader, own, own + plan.computed) + request.encoding(reader, source.num_tokens)
        rest = times(uncached - plan.loaded + encoding)
        pull = plan.seconds / cost.CLEAR_WIN - (plan.seconds if plan.computed else 0.0)  # a split is in ``rest``
        source_times = PromptTimes(rest.first_token + pull, rest.delays)
        if source_times.cost < best.cost:
            best = source_times
            chosen = source
    return best, chosen, computed.cost - best.cost


class Unpriced(NamedTuple):
    """A node without predictable costs, and the reason."""

    node_id: str
    reason: OutOfRange


def priced(snapshot: FleetSnapshot) -> tuple[FleetSnapshot, StepCosts]:
    """Return the nodes of the snapshot's model that have a price, with all costs, and the typical costs."""
    nodes = [node for node in snapshot.nodes if node.model == snapshot.model]
    typical = snapshot.typical or typical_costs(nodes)
    priced_nodes, _ = price(nodes, typical)
    return FleetSnapshot(snapshot.model, tuple(priced_nodes), snapshot.counter, typical), typical


def price(nodes: Sequence[NodeView], typical: StepCosts) -> tuple[list[NodeView], list[Unpriced]]:
    """Return nodes with all costs, typical ones where they have measured none, and the nodes without a price."""
    priced_nodes = list[NodeView]()
    unpriced = list[Unpriced]()
    for node in nodes:
        costs = node_costs(node, typical)
        reason = cost.out_of_range(node.load, node.costs) or cost.out_of_range(node.load, costs)
        if reason is None:
            priced_nodes.append(msgspec.structs.replace(node, costs=costs))
        else:
            unpriced.append(Unpriced(node.node_id, reason))
    return priced_nodes, unpriced


def typical_costs(nodes: Sequence[NodeView]) -> StepCosts:
    """Return the mean of the measured bases and the median of the slopes; defaults for unmeasured costs."""
    measured = [node.costs for node in nodes if cost.out_of_range(node.load, node.costs) is None]
    lines_by_name = {}
    for name in StepCosts.__struct_fields__:
        if lines := [line for costs in measured if (line := getattr(costs, name))]:
            base = fmean(line.base for line in lines)
            slopes = [line.slope for line in lines if line.slope]
            assumed = getattr(cost.TYPICAL, name)
            lines_by_name[name] = LinearCost(base, median(slopes) if slopes else base * assumed.slope / assumed.base)
    return msgspec.structs.replace(cost.TYPICAL, **lines_by_name)


def node_costs(node: NodeView, typical: StepCosts) -> StepCosts:
    """Return the costs of a node, with typical ones for those that it has not measured.

    Its steps show how fast it decodes as many sequences as now. Other numbers take as long as is typical, times that: a
    node whose number hardly changes finds any slope.
    """
    measured = node.costs
    line = typical.decode
    seconds = measured.decode.at(node.load.decoding)
    usual = line.at(node.load.decoding)
    factor = seconds / usual if seconds and usual else 1.0
    decode = LinearCost(factor * line.base, factor * line.slope)
    return StepCosts(measured.prompt or typical.prompt, decode, measured.read or typical.read)
