"""The nodes of one model: the policy places each request on them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice

import msgspec

from pdserve.adapters.adapter import NamedAdapter, is_digest
from pdserve.errors import AdapterMissing, Overloaded, RequestError, shown
from pdserve.images import ImageInput
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import TOKEN_BYTES
from pdserve.request_cost import TYPICAL, StepCosts, worth_handoff
from pdserve.tracing.spans import Attributes, Value
from router.fleet.image_index import NO_IMAGES, HeldImages, PromptImages
from router.fleet.image_nodes import ImageNodes
from router.fleet.node_client import NodeClient
from router.fleet.nodes import Nodes
from router.fleet.policy import (
    BOTH,
    GENERATE,
    NO_HINT,
    POLICIES,
    PREFIX_AWARE,
    PREFIX_POLICIES,
    TASKS,
    FleetSnapshot,
    NodeView,
    Placement,
    PolicyRequest,
    RoutingHint,
    compared_options,
    no_serving_node,
    pooling_node,
    price,
    typical_costs,
)
from router.fleet.prefix_index import CachedBlocks, PromptPrefix
from router.fleet.serve_stream import OutputHandler, ServeStream
from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

_INLINE_TOKENS = 16_384  # longer prompts are hashed on a thread; a millisecond of hashing
_MOST_ADAPTERS = 4096  # adapters per node
_TYPICAL_SECONDS = 1.0  # between computations of the mean costs

_ENDPOINTS = {
    GENERATE: "/v1/completions, /v1/chat/completions or /v1/responses",
    "embed": "/v1/embeddings, /v1/score or /v1/rerank",
    "classify": "/v1/score or /v1/rerank",
}  # by task


class ModelLimits(msgspec.Struct, frozen=True):
    """Requests that at least one node of a model takes. Other nodes may take less, and get only what they take.

    So a node that describes itself wrongly makes no router refuse what other nodes serve.
    """

    lengths: tuple[int, ...]  # ``max_model_len`` of the nodes, in tokens, ascending
    vocab_size: int
    task: str = GENERATE
    vector_sizes: frozenset[int] = frozenset()  # values of a vector, without the task "generate"
    matryoshka: bool = False  # clients may ask for fewer dimensions
    yes_or_no: bool = False  # scores compare the tokens "yes" and "no"

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""
        return self.lengths[-1]

    def length_beyond(self, num_tokens: int) -> int:
        """Return the least ``max_model_len`` above a number of tokens, or the largest of all."""
        return next((length for length in self.lengths if length > num_tokens), self.max_model_len)


class NodeCall:
    """A request at a decode node. It ends by ``finish``, ``cancel`` or a failure; calls after the end do nothing."""

    def __init__(
        self,
        node: NodeView,
        stream: ServeStream,
        number: int,
        decode: NodeClient,
        prefill: NodeClient | None,
        placed: Attributes,
    ) -> None:
        """``placed`` says for a trace where the request is, and why."""
        self.node = node
        self.placed = placed
        self.computing = prefill or decode  # the node that computes the prompt
        self.on_prefilled: Callable[[], None] = _nothing  # called when the prompt is computed, and at the end
        self._stream = stream
        self._number = number
        self._decode: NodeClient | None = decode
        self._prefill = prefill

    def prefilled(self) -> None:
        """Count the request as done on P. Idempotent."""
        self.on_prefilled()
        self.on_prefilled = _nothing
        if self._prefill is not None:
            self._prefill.remove_request()
            self._prefill = None

    def finish(self) -> None:
        self._release()
        self._stream.forget(self._number)

    def cancel(self) -> None:
        self._release()
        self._stream.cancel(self._number)

    def set_paused(self, paused: bool) -> None:
        self._stream.set_paused(self._number, paused)

    @property
    def suspect(self) -> object | None:
        """The request on trial at the node; after a crash, the request that was on trial."""
        return self._stream.suspect

    @suspect.setter
    def suspect(self, suspect: object | None) -> None:
        self._stream.suspect = suspect

    def _release(self) -> None:
        self.prefilled()
        if self._decode is not None:
            self._decode.remove_request()
            self._decode = None


class Fleet:
    def __init__(self, model: str, nodes: Nodes, policy: str, metrics: RouterMetrics) -> None:
        self._model = model
        self._nodes = nodes
        self._policy = policy
        self._metrics = metrics
        self._members = _Members({}, model)
        self._images = ImageNodes(model)
        self._typical = TYPICAL
        self._typical_until = 0.0  # time.monotonic
        self._unpriced: set[str] = set()  # ids of nodes
        self.suspect_turn = asyncio.Lock()  # held while a pooling batch runs that an engine has ended with

    def snapshot(self) -> FleetSnapshot:
        return FleetSnapshot(self._model, self._nodes.views(), self._nodes.placement_counter)

    def limits(self, tasks: Sequence[str] = TASKS) -> ModelLimits:
        """Return the limits of the ready nodes that serve the first of ``tasks`` with any.

        Raises Overloaded when no node is ready, and RequestError when all have other tasks.
        """
        limits = self._current_members().limits
        for task in tasks:
            if task in limits:
                return limits[task]
        for task in limits:
            remedy = f"use {_ENDPOINTS[task]}"
            raise RequestError(f"model {self._model!r} has the task {task!r}, not {tasks[0]!r}; {remedy}", "model")
        raise no_serving_node(self.snapshot(), tasks[0])

    @property
    def image_input(self) -> ImageInput | None:
        """How the model's nodes take images; None as long as no node that takes them has been ready."""
        self._current_members()
        return self._images.accepted

    def serving(self, task: str) -> list[NodeView]:
        """The ready nodes of a task."""
        return [node for node in self._nodes.views() if node.serves and node.task == task and node.model == self._model]

    def pooling_node(self, task: str, lengths: Sequence[int], left: Collection[str], weights: str | None) -> NodeClient:
        """Choose a prefill node with these weights, or any, that is not in ``left``, for prompts of these lengths.

        Raises Overloaded.
        """
        views = _taking(max(lengths), self._nodes.views())
        snapshot = FleetSnapshot(self._model, views, self._nodes.placement_counter)
        chosen = pooling_node(self._policy, snapshot, task, sum(lengths), left, weights)
        self._nodes.placement_counter += 1
        return self._nodes.find("prefill", chosen)

    def has_decode_node(self, length: int, accepts: Callable[[NodeView], bool]) -> bool:
        """Return whether an accepted decode node for requests of ``length`` tokens is ready, and not stalled."""
        nodes = self.snapshot().usable("decode")
        return any(accepts(node) and not node.stalled and node.max_model_len >= length for node in nodes)

    async def prepare(self, prefix: PromptPrefix) -> None:
        """Hash the blocks of a long prompt on a thread, so that other streams go on meanwhile."""
        if self._policy in PREFIX_POLICIES and prefix.num_tokens > _INLINE_TOKENS:
            for block_size in list(self._current_members().cached):
                await asyncio.to_thread(prefix.hashes, block_size)

    def generate(
        self,
        message: pb.Generate,
        handler: OutputHandler,
        prefix: PromptPrefix,
        *,
        accepts: Callable[[NodeView], bool] | None = None,
        alone: bool = False,
        hint: RoutingHint = NO_HINT,
    ) -> NodeCall:
        """Choose nodes and send the request, whose prompt is ``prefix``.

        ``accepts`` filters decode nodes. ``alone``: no P takes part.
        Raises Overloaded when no accepted decode node is ready, RequestError if ``hint`` names no known node, or if
        the sampling parameters do not go with the images.
        """
        views = self._nodes.views()
        typical = self._typical_costs(views)
        views = _taking(prefix.num_tokens + message.sampling.max_tokens, views)
        if message.sampling.adapter:
            views = self._with_adapter(message.sampling.adapter, views)
        if accepts is not None:
            views = tuple(view for view in views if view.role == "prefill" or accepts(view))
        worth = worth_handoff(prefix.num_tokens, message.sampling.prompt_logprobs)
        hands_off = worth and not alone
        if prefix.images:
            self._current_members()
            views, hands_off = self._images.choose(views, prefix, message.sampling.n, worth=worth, alone=alone)
        if hands_off:
            request = self._policy_request(prefix)
        else:
            request = PolicyRequest(prefix.num_tokens, may_hand_off=False, images=self._prompt_images(prefix))
        if hint is not NO_HINT:
            fields = {"prefills": self._named_prefills(hint.prefill), "ttft": hint.ttft, "tpot": hint.tpot}
            request = msgspec.structs.replace(request, **fields)
        snapshot = FleetSnapshot(self._model, views, self._nodes.placement_counter, typical)
        placement = POLICIES[self._policy](snapshot, request)
        if prefix.images:
            self._images.check(placement, views)
        self._nodes.placement_counter += 1
        decode = self._nodes.find("decode", placement.decode)
        prefill = None if placement.prefill is None else self._nodes.find("prefill", placement.prefill)
        _name_nodes(message, placement)
        view = decode.view()
        assert decode.stream is not None, "a ready decode node has a stream"
        assert view is not None, "it was chosen by its view"
        number = decode.stream.generate(message, handler)
        self._account(request, placement, decode, prefill)
        placed = _placed(message, placement.decode)
        if message.traceparent and self._policy == PREFIX_AWARE:
            options = compared_options(snapshot, request, placement)
            placed["pdserve.placement.options"] = [str(option) for option in options]
        return NodeCall(view, decode.stream, number, decode, prefill, placed)

    def move(self, message: pb.Generate, handler: OutputHandler, to: Placement, num_tokens: int) -> NodeCall:
        """Send a running request of ``num_tokens`` to ``to.decode``, which pulls its KV from ``to.prefill``.

        Raises Overloaded when that node is not ready for it, or takes only shorter requests.
        """
        views = {view.node_id: view for view in self._nodes.views()}
        target = views.get(to.decode)
        source = views.get(to.prefill or "")
        if target is None or source is None or not (target.ready and source.ready and target.reads_from(source)):
            raise Overloaded(f"node {to.decode} cannot read from {to.prefill} now")
        if message.sampling.adapter not in target.adapters:
            raise Overloaded(f"node {to.decode} does not have the adapter of the request")
        if target.max_model_len < len(message.token_ids) // TOKEN_BYTES + message.sampling.max_tokens:
            raise Overloaded(f"node {to.decode} takes no request of this length")
        decode = self._nodes.find("decode", target.node_id)
        message.prefill_node = source.node_id
        message.pull = True
        assert decode.stream is not None, "a ready node that decodes has a stream"
        number = decode.stream.generate(message, handler)
        decode.add_request(0, num_tokens)
        return NodeCall(target, decode.stream, number, decode, None, _placed(message, to.decode))

    def _with_adapter(self, digest: str, views: Sequence[NodeView]) -> tuple[NodeView, ...]:
        """Return the nodes that have an adapter. Raises AdapterMissing if none that decodes is ready."""
        having = tuple(view for view in views if digest in view.adapters)
        if not any(view.decodes and view.ready and view.model == self._model for view in having):
            text = f"no ready decode node has adapter {digest[:12]}… of model {self._model!r}"
            raise AdapterMissing(f"{text}; try again shortly, or load it again")
        return having

    @property
    def adapters(self) -> Mapping[str, NamedAdapter]:
        """Adapters by name, as the model's nodes describe them. During a reload, most nodes decide on the digest."""
        return self._current_members().adapters

    def movable(self, node_id: str) -> list[OutputHandler]:
        """Return this router's requests that may leave a node, those with the least KV first."""
        client = self._nodes.known().get((BOTH, node_id))
        return [] if client is None or client.stream is None else client.stream.movable()

    def _account(
        self, request: PolicyRequest, placement: Placement, decode: NodeClient, prefill: NodeClient | None
    ) -> None:
        """Add the request to the load of its nodes and to the metrics."""
        cached = max(request.cached.get(placement.prefill or placement.decode, 0), placement.source_tokens)
        computing = (prefill or decode).view()
        assert computing is not None, "it was chosen by its view"
        computed = request.to_compute(computing, placement.source_tokens)
        decode.add_request(0 if prefill else computed, request.num_tokens)
        if prefill is not None:
            prefill.add_request(computed, request.num_tokens, for_peer=True)
        self._metrics.placements.labels(self._policy, "local" if prefill is None else "remote").inc()
        self._metrics.expected_cached_tokens.inc(cached)

    def _policy_request(self, prefix: PromptPrefix) -> PolicyRequest:
        """Look the prompt up in the prefix index, if the policy uses it."""
        if self._policy not in PREFIX_POLICIES:
            return PolicyRequest(prefix.num_tokens)
        cached: dict[str, int] = {}
        for block_size, nodes in self._current_members().cached.items():
            most = (prefix.num_tokens - 1) // block_size  # the last token is always computed
            matches = self._nodes.prefixes.match(prefix.hashes(block_size)[:most], nodes)
            cached.update((nodes[blocks], count * block_size) for blocks, count in matches.items())
        return PolicyRequest(prefix.num_tokens, cached, images=self._prompt_images(prefix))

    def _prompt_images(self, prefix: PromptPrefix) -> PromptImages:
        """Look the images of a prompt up on the nodes that encode images, if the policy reads that."""
        if self._policy not in PREFIX_POLICIES or not prefix.images:
            return NO_IMAGES
        return PromptImages.of_nodes(prefix.images, self._current_members().held_images())

    def _named_prefills(self, addresses: Sequence[str]) -> frozenset[str] | None:
        """Return the ids of listed P at these addresses, or alone on these hosts. Raises RequestError if none is known.

        A scheduler knows a pod's HTTP port, which is not the port of gRPC.
        """
        if not addresses:
            return None
        listed = {
            node.address: node.description.node_id
            for node in self._nodes
            if node.role in ("prefill", BOTH) and node.description is not None
        }
        node_ids = set[str]()
        for address in addresses:
            host = address.rpartition(":")[0] or address
            on_host = [node_id for other, node_id in listed.items() if other.rpartition(":")[0] == host]
            if address in listed:
                node_ids.add(listed[address])
            elif len(on_host) == 1:
                node_ids.add(on_host[0])
        if not node_ids:
            text = f"no prefill node at {shown(', '.join(addresses))} is known here, or several are on that host"
            raise RequestError(f"{text}; name one that this server discovers, with its port of gRPC")
        return frozenset(node_ids)

    def _current_members(self) -> _Members:
        nodes = self._nodes.known()
        if self._members.nodes is not nodes:
            self._members = _Members(nodes, self._model)
            self._images.update(self._members.image_inputs or self._members.continued_inputs)
        return self._members

    def _typical_costs(self, views: Sequence[NodeView]) -> StepCosts:
        now = time.monotonic()
        if now > self._typical_until:
            views = [view for view in views if view.model == self._model]
            self._typical = typical_costs(views)
            self._typical_until = now + _TYPICAL_SECONDS
            self._warn_of_unpriced(views)
        return self._typical

    def _warn_of_unpriced(self, views: Sequence[NodeView]) -> None:
        """Log nodes that have lost their price. Only ``prefix-aware`` asks for prices."""
        unpriced = price(views, self._typical)[1] if self._policy == PREFIX_AWARE else []
        for node_id, reason in unpriced:
            if node_id not in self._unpriced:
                text = "node %s gets no requests while others have a price: it reports that %s; restart it"
                logger.warning(text, node_id, reason)
        self._unpriced = {node.node_id for node in unpriced}


def _name_nodes(message: pb.Generate, placement: Placement) -> None:
    """Name the nodes beside the decode node. If the decode node pulls, the source counts as its prefill node."""
    message.prefill_node = placement.prefill or placement.source or ""
    message.pull = placement.prefill is None and placement.source is not None
    message.prefix_node = placement.source or "" if placement.prefill else ""
    message.prefix_tokens = placement.source_tokens


def _placed(message: pb.Generate, decode: str) -> dict[str, Value]:
    """Return the attributes of a trace that name the nodes of a request."""
    placed: dict[str, Value] = {"pdserve.decode_node": decode, "pdserve.prefill_node": message.prefill_node}
    if message.prefix_tokens:
        placed["pdserve.pull.node"] = message.prefill_node if message.pull else message.prefix_node
        placed["pdserve.pull.expected_tokens"] = message.prefix_tokens
    return placed


def _nothing() -> None:
    """Replaces a callback that is not needed."""


class _Members:
    """The nodes of a model, with values derived from them that hold until a node changes."""

    def __init__(self, nodes: Mapping[tuple[str, str], NodeClient], model: str) -> None:
        self.nodes = nodes
        self.cached: dict[int, dict[CachedBlocks, str]] = {}  # block size → cached blocks → node id
        ready: dict[str, list[pb.NodeDescription]] = {}  # nodes that take requests, by task
        self.image_inputs: dict[str, ImageInput] = {}  # ready nodes that encode images, by id
        self.continued_inputs: dict[str, ImageInput] = {}  # ready nodes that need a peer for that
        descriptions = list[pb.NodeDescription]()
        for node in nodes.values():
            description = node.description
            if description is None or description.model != model:
                continue
            descriptions.append(description)
            block_size = description.kv_layout.block_size
            if node.cached is not None and block_size:
                self.cached.setdefault(block_size, {})[node.cached] = description.node_id
            view = node.view()
            if view is not None and view.serves:
                ready.setdefault(view.task, []).append(description)
            if view is not None and view.ready and view.images is not None:
                self.image_inputs[view.node_id] = view.images
            if view is not None and view.ready and view.continued_images is not None:
                self.continued_inputs[view.node_id] = view.continued_images
        self.limits = {task: _limits(task, nodes) for task, nodes in ready.items()}
        self.adapters = _named_adapters(descriptions)

    def held_images(self) -> list[tuple[str, HeldImages]]:
        """Return the images that nodes report, by node id."""
        ids = ((node.description.node_id, node.held_images) for node in self.nodes.values() if node.description)
        return [(node_id, held) for node_id, held in ids if held and node_id in self.image_inputs]


def _named_adapters(nodes: Sequence[pb.NodeDescription]) -> dict[str, NamedAdapter]:
    """Return the adapters by name. Nodes that decode choose between digests of one name, the most frequent first."""
    counts = Counter[NamedAdapter]()
    for node in nodes:
        for adapter in islice(node.adapters, _MOST_ADAPTERS):
            if adapter.name and is_digest(adapter.digest):
                named = NamedAdapter(adapter.name, adapter.digest, adapter.rank, adapter.root)
                counts[named] += 2 if node.role != "prefill" and node.state == "ready" else 1
    by_rarity = sorted(counts, key=lambda named: (counts[named], named.digest))
    return {named.name: named for named in by_rarity}


def _taking(length: int, views: Sequence[NodeView]) -> tuple[NodeView, ...]:
    """Return the nodes that take requests of ``length`` tokens, output included; all nodes if none does."""
    return tuple(view for view in views if view.max_model_len >= length) or tuple(views)


def _limits(task: str, nodes: Sequence[pb.NodeDescription]) -> ModelLimits:
    return ModelLimits(
        lengths=tuple(sorted({node.max_model_len for node in nodes})),
        vocab_size=max(node.vocab_size for node in nodes),
        task=task,
        vector_sizes=frozenset(node.pooling.size for node in nodes),
        matryoshka=any(node.pooling.matryoshka for node in nodes),
        yes_or_no=all(node.pooling.yes_or_no for node in nodes),
    )
