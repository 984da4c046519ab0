"""The prefix of a prompt that P computes, pulled from the node that the router names.

Whatever happens to the pull, P computes the tokens without KV, and its D notices nothing but time.
"""

from __future__ import annotations

import logging

from node.engine_client.client import EngineClient
from node.load_spans import pull_attributes
from node.reading.peers import KVPeers
from node.reading.pull_driver import Pull
from pdserve.errors import PdserveError
from pdserve.ipc.messages import KVConfirmed, PrefillLocally
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import TOKEN_BYTES, Peer, ReadResult
from pdserve.rpc.protobuf import sampling_from_pb, sampling_to_pb
from pdserve.tracing.spans import NO_ATTRIBUTES, NO_SPAN, Attributes, Span, SpanKind

_log = logging.getLogger(__name__)


class PulledPrefix:
    """A PulledPrompt."""

    def __init__(
        self, request: pb.PrefillRequest, rid: int, parent: Span, engine: EngineClient, peers: KVPeers
    ) -> None:
        """``request`` is the prompt, with its source and how much that is expected to have; ``rid`` is the engine's.

        ``parent`` is the span of the prompt on this node.
        """
        self.rid = rid
        self.request_id = request.request_id
        self.num_tokens = len(request.token_ids) // TOKEN_BYTES - 1  # this node samples: it computes the last token
        self._request = request
        self._parent = parent
        self._engine = engine
        self._peers = peers
        self._span = NO_SPAN
        self._expected: Attributes = NO_ATTRIBUTES

    def plan(self, cached_tokens: int) -> Pull | None:
        missing = max(0, min(self._request.prefix_tokens, self.num_tokens) - cached_tokens)
        plan = self._peers.plan_pull(missing)
        predicted = pull_attributes(self._peers.costs, missing, plan)
        self._expected = {"pdserve.pull.node": self._request.prefix_node, **predicted}
        return None if plan is None else Pull(plan, self._peers.pull_deadline(missing))

    def decline(self) -> None:
        """Have the engine compute the tokens in the reserved blocks: a confirmation of nothing."""
        self._parent.event("no pull", self._expected)
        self._engine.send(KVConfirmed(self.rid, 0, ()))

    def ask(self, source: Peer) -> pb.PrefillRequest:
        request = self._request
        self._span = self._parent.child("pull", self._expected, SpanKind.CLIENT)
        return pb.PrefillRequest(
            request_id=request.request_id,
            token_ids=request.token_ids[: self.num_tokens * TOKEN_BYTES],
            sampling=sampling_to_pb(sampling_from_pb(request.sampling).for_kv(1)),  # the source computes nothing
            cache_salt=request.cache_salt,
            timeout_ms=request.timeout_ms,
            traceparent=self._span.traceparent,
            tracestate=self._span.tracestate,
            images=request.images,
        )

    def on_asked(self) -> None:
        """Do nothing: no stream of tokens waits for the end of this node's step."""

    def on_read_started(self) -> None:
        """Do nothing: one span shows the whole pull."""

    def on_read_ended(self, read: ReadResult) -> None:
        """Do nothing: the span has no sizes of reads."""

    def on_confirmed(self, confirmed: KVConfirmed, num_tokens: int) -> None:
        self._span.set({"pdserve.pull.tokens": max(0, num_tokens)})
        self._span.end()
        self._engine.send(confirmed)

    def on_failed(self, error: PdserveError) -> None:
        self._peers.metrics.pull_failures.inc()
        self._span.fail(error)
        self._span.end()
        _log.info("request %s is computed without its pull: %s", self.request_id or self.rid, error)
        self._engine.send(PrefillLocally(self.rid))

    def on_abandoned(self) -> None:
        self._span.end()
