"""Pulls the prefix of a prompt from a peer's prefix cache, before this node computes the rest for another peer.

    reserved ─► worth it? ─► leased by the source ─► read ─► confirmed ─► the rest is computed
                   │ no         │ nothing, refused, revoked, late, broken    ▲
                   └────────────┴────────────────────────────────────────────┘

After any failure the prompt goes on: this node computes the tokens without KV. A pull is late when this node would
have computed the tokens by then. Where a pull takes about as long as computation, the node computes the first tokens
meanwhile (``plan_pull``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from node.context import NodeContext
from node.load_spans import pull_attributes
from node.reading.handoff import Event, Handoff, ReadFailed
from node.reading.handoff_executor import HandoffExecutor
from node.reading.peer import KVPeer
from node.reading.peers import KVPeers
from pdserve.errors import PdserveError, PeerError
from pdserve.ipc.messages import ComputeBeside, KVConfirmed, PrefillLocally, ReadChecked, ReadEnded, Reserved
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import TOKEN_BYTES
from pdserve.request_cost import NO_PULL
from pdserve.rpc.protobuf import sampling_to_pb
from pdserve.sampling_params import SamplingParams
from pdserve.tracing.spans import NO_SPAN, Attributes, Span, SpanKind

_log = logging.getLogger(__name__)
T = TypeVar("T")

_NO_TOKENS = SamplingParams(max_tokens=1, temperature=0.0)  # the source computes nothing


class PrefixPull(HandoffExecutor):
    """One pull, from the reservation of blocks to its end. It begins with the engine's first event."""

    def __init__(
        self,
        node: NodeContext,
        peers: KVPeers,
        peer: KVPeer,
        request: pb.PrefillRequest,
        rid: int,
        parent: Span,
    ) -> None:
        """``request`` is the prompt, with its source and how much that is expected to have; ``rid`` is the engine's.

        ``parent`` is the span of the prompt on this node.
        """
        super().__init__(node.engine)
        self._node = node
        self._peers = peers
        self._peer = peer
        self._request = request
        self._rid = rid
        self._parent = parent
        self._span = NO_SPAN
        self._cached_tokens = 0  # here
        self._plan = NO_PULL
        self._ended = False

    def on_engine_event(self, event: Reserved | ReadEnded | ReadChecked) -> None:
        if isinstance(event, Reserved):
            self._guard(self._start, event.cached_tokens)
        else:
            self.on_event(event)

    def on_event(self, event: Event) -> None:
        self._guard(self._advance, event)

    def abandon(self) -> None:
        """End the pull, as its prompt has ended. Idempotent."""
        if not self._ended:
            self._ended = True
            self._span.end()
            self._give_up()

    def _guard(self, step: Callable[[T], None], value: T) -> None:
        """Run a step of the pull. An error ends the pull, not the prompt."""
        if self._ended:
            return
        try:
            step(value)
        except PdserveError as exc:
            self._fail(exc)
        except Exception as exc:
            _log.exception("the pull for request %s failed", self._request.request_id)
            self._fail(PeerError(f"the pull failed: {exc}"))

    def _start(self, cached_tokens: int) -> None:
        """Ask the source, if the tokens that it is expected to have are worth it."""
        request = self._request
        most = len(request.token_ids) // TOKEN_BYTES - 1  # this node samples, so it computes the last token
        missing = max(0, min(request.prefix_tokens, most) - cached_tokens)
        costs, now, plan = self._peers.costs, time.monotonic(), self._peers.plan_pull(missing)
        expected: Attributes = {"pdserve.pull.node": request.prefix_node, **pull_attributes(costs, missing, plan)}
        if plan is None:
            self._parent.event("no pull", expected)
            self._continue()
            return
        stream = self._stream = self._peer.stream
        if stream is None:
            raise PeerError(f"{self._peer.address} was lost while the request waited for KV blocks")
        self._cached_tokens, self._plan = cached_tokens, plan
        if plan.computed:
            self._engine.send(ComputeBeside(self._rid, cached_tokens + plan.computed))
        self._span = self._parent.child("pull", expected, SpanKind.CLIENT)
        pull = pb.PrefillRequest(
            request_id=request.request_id,
            token_ids=request.token_ids[: most * TOKEN_BYTES],
            sampling=sampling_to_pb(_NO_TOKENS),
            cache_salt=request.cache_salt,
            skip_tokens=cached_tokens + plan.computed,
            timeout_ms=request.timeout_ms,
            traceparent=self._span.traceparent,
            tracestate=self._span.tracestate,
            cached_only=True,
            kv_layers=self._node.config.kv_layers_with(stream.peer.other_drafts),
        )
        number = stream.prefill(pull, self.on_event)
        self._handoff = Handoff(
            self._rid,
            number,
            most,
            peer=stream.peer,
            timing=self._node.config.options.peer_timing,
            sent_at=now,
            pull=True,
            due=now + self._peers.pull_deadline(missing),
        )
        self._wake_at(self._handoff.wake_at)

    def _advance(self, event: Event) -> None:
        handoff = self._handoff
        assert handoff is not None, "events follow the request to the source"
        self._execute(handoff, handoff.on(event, time.monotonic()))

    def _confirm(self, confirmed: KVConfirmed) -> None:
        self._ended = True
        num_tokens = confirmed.num_tokens - self._cached_tokens - self._plan.computed
        self._peers.metrics.count_pull(num_tokens, self._peers.costs, self._seconds, computed=self._plan.computed)
        self._span.set({"pdserve.pull.tokens": max(0, num_tokens)})
        self._span.end()
        self._engine.send(confirmed)

    def _continue(self) -> None:
        """Compute the uncached tokens, in the reserved blocks: nothing has been read."""
        self._ended = True
        self._engine.send(KVConfirmed(self._rid, 0, ()))

    def _fail(self, error: PdserveError) -> None:
        if self._ended:
            return
        self._ended = True
        self._peers.metrics.pull_failures.inc()
        self._peers.metrics.count_failed_pull(error, self._seconds)
        self._span.fail(error)
        self._span.end()
        _log.info("request %s is computed without its pull: %s", self._request.request_id or self._rid, error)
        self._give_up()
        if isinstance(error, ReadFailed):
            self._peer.reset(str(error))
        elif isinstance(error, PeerError):
            self._peer.check()
        self._engine.send(PrefillLocally(self._rid))

    def _give_up(self) -> None:
        if self._handoff is not None:
            self._execute(self._handoff, self._handoff.give_up())
