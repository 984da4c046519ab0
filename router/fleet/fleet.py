"""The nodes of a model: a snapshot for the policy, and the way from its answer to a call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from pdserve.pb import pdserve_pb2 as pb
from pdserve.request_cost import TYPICAL, worth_handoff
from pdserve.throughput import Throughput
from router.fleet.node_call import CallSink
from router.fleet.node_client import NodeClient
from router.fleet.nodes import Nodes
from router.fleet.policy import (
    POLICIES,
    PREFIX_AWARE,
    FleetSnapshot,
    NodeView,
    PolicyRequest,
    no_decode_node,
    typical_throughput,
)
from router.fleet.prefix_index import CachedBlocks, PromptPrefix
from router.fleet.serve_stream import ServeStream
from router.metrics import RouterMetrics

_INLINE_TOKENS = 16_384  # of a prompt: a millisecond of hashing
_TYPICAL_SECONDS = 1.0  # between two computations of the mean throughput


class ModelLimits(msgspec.Struct, frozen=True):
    """Limits of a model's decode nodes."""

    max_model_len: int  # tokens
    vocab_size: int


class NodePair:
    """A request at a decode node. Ends by ``finish``, ``cancel`` or a failure to the sink; the first one counts."""

    def __init__(
        self, node: NodeView, stream: ServeStream, number: int, decode: NodeClient, prefill: NodeClient | None
    ) -> None:
        self.node = node
        self._stream = stream
        self._number = number
        self._decode: NodeClient | None = decode
        self._prefill = prefill

    def prefilled(self) -> None:
        """The first token is there: P has done its part. Idempotent."""
        if self._prefill is not None:
            self._prefill.done()
            self._prefill = None

    def finish(self) -> None:
        self._leave()
        self._stream.finished(self._number)

    def cancel(self) -> None:
        self._leave()
        self._stream.cancel(self._number)

    def _leave(self) -> None:
        self.prefilled()
        if self._decode is not None:
            self._decode.done()
            self._decode = None


class Fleet:
    """The nodes of one model."""

    def __init__(self, model: str, nodes: Nodes, policy: str, metrics: RouterMetrics) -> None:
        self._model = model
        self._nodes = nodes
        self._policy = policy
        self._metrics = metrics
        self._members = Members({}, model)
        self._typical = TYPICAL
        self._typical_until = 0.0  # of time.monotonic

    def snapshot(self) -> FleetSnapshot:
        return FleetSnapshot(self._model, self._nodes.views(), self._nodes.turn)

    def limits(self) -> ModelLimits:
        """The smallest limits of the ready decode nodes. Raises Overloaded when none is ready."""
        limits = self._current_members().limits
        if limits is None:
            raise no_decode_node(self.snapshot())
        return limits

    async def prepare(self, prefix: PromptPrefix) -> None:
        """Have a long prompt's chain computed on a thread, so that it does not hold up other streams."""
        if self._policy == PREFIX_AWARE and prefix.num_tokens > _INLINE_TOKENS:
            for size in list(self._current_members().cached):
                await asyncio.to_thread(prefix.numbers, size)

    def generate(
        self,
        message: pb.Generate,
        sink: CallSink,
        accepts: Callable[[NodeView], bool] | None = None,
        prefix: PromptPrefix | None = None,
    ) -> NodePair:
        """Place a request at a decode node that is accepted (None: any), and send it; ``prefix`` is that of its prompt.

        Raises Overloaded when none is ready.
        """
        views = self._nodes.views()
        snapshot = FleetSnapshot(self._model, views, self._nodes.turn, self._typical_throughput(views))
        if accepts is not None:
            snapshot = snapshot.among(accepts)
        prefix = prefix or PromptPrefix(message.token_ids, message.cache_salt)
        if not worth_handoff(prefix.num_tokens, message.sampling.prompt_logprobs):
            snapshot, ask = snapshot.without("prefill"), PolicyRequest(prefix.num_tokens)
        else:
            ask = self._ask(prefix)
        placement = POLICIES[self._policy](snapshot, ask)
        self._nodes.turn += 1
        known = self._nodes.known()
        decode = known["decode", placement.decode]
        prefill = None if placement.prefill is None else known["prefill", placement.prefill]
        message.prefill_node = placement.prefill or ""
        view = decode.view()
        assert decode.stream is not None, "a ready decode node has a stream"
        assert view is not None, "it was chosen by its view"
        number = decode.stream.generate(message, sink)
        self._account(ask, decode, prefill)
        return NodePair(view, decode.stream, number, decode, prefill)

    def _account(self, ask: PolicyRequest, decode: NodeClient, prefill: NodeClient | None) -> None:
        """Count a placement, and what it makes the nodes do."""
        computes = prefill or decode
        assert computes.description is not None
        node_id = computes.description.node_id
        computes.sent(ask.uncached(node_id), ask.num_tokens)
        if prefill is not None:
            decode.sent(0, ask.num_tokens)
        self._metrics.placements.labels(self._policy, "local" if prefill is None else "remote").inc()
        self._metrics.expected_cached_tokens.inc(ask.cached.get(node_id, 0))

    def _ask(self, prefix: PromptPrefix) -> PolicyRequest:
        """What the policy needs to know of a prompt: who has how much of it, if that matters."""
        if self._policy != PREFIX_AWARE:
            return PolicyRequest(prefix.num_tokens)
        cached: dict[str, int] = {}
        for size, nodes in self._current_members().cached.items():
            most = (prefix.num_tokens - 1) // size  # the last token is always computed
            found = self._nodes.prefixes.match(prefix.numbers(size)[:most], nodes)
            cached.update((nodes[blocks], count * size) for blocks, count in found.items())
        return PolicyRequest(prefix.num_tokens, cached)

    def _current_members(self) -> Members:
        known = self._nodes.known()
        if self._members.known is not known:
            self._members = Members(known, self._model)
        return self._members

    def _typical_throughput(self, views: Sequence[NodeView]) -> Throughput:
        """Looked up now and then: that of a fleet changes slowly."""
        now = time.monotonic()
        if now > self._typical_until:
            self._typical = typical_throughput([view for view in views if view.model == self._model])
            self._typical_until = now + _TYPICAL_SECONDS
        return self._typical


class Members:
    """The nodes of a model among those that are known, and what follows from it until something changes."""

    def __init__(self, known: Mapping[tuple[str, str], NodeClient], model: str) -> None:
        self.known = known
        self.cached: dict[int, dict[CachedBlocks, str]] = {}  # by block size: what nodes have, and their ids
        described: list[pb.NodeDescription] = []  # ready decode nodes
        for node in known.values():
            description = node.description
            if description is None or description.model != model:
                continue
            size = description.kv_layout.block_size
            if node.cached is not None and size:
                self.cached.setdefault(size, {})[node.cached] = description.node_id
            if node.role == "decode" and node.ready:
                described.append(description)
        self.limits: ModelLimits | None = None  # the smallest, of a node that is ready
        if described:
            self.limits = ModelLimits(min(d.max_model_len for d in described), min(d.vocab_size for d in described))
