"""A request on D whose KV another node's prefix cache has: that of a moved stream, or of a new prompt's prefix.

D computes what the pull did not bring. So a pull that fails is no reason to fail the request, whatever the failure
policy, but for a source whose engine ended with it.
"""

from __future__ import annotations

import logging
import time
from math import inf

import msgspec

from decode_node.decode_metrics import DecodeMetrics
from decode_node.generation import NodeGeneration
from decode_node.handoff_policy import HandoffPolicy
from node.engine_client.client import EngineClient
from node.load_spans import pull_attributes
from node.reading.peers import KVPeers
from node.reading.pull_driver import Pull
from pdserve.errors import EngineCrashed, Overloaded, PdserveError, PrefillCrashed
from pdserve.ipc.messages import HandoffEnds, KVConfirmed, PrefillLocally
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import Peer, ReadResult
from pdserve.request_cost import NO_PULL

_log = logging.getLogger(__name__)


class PulledGeneration:
    """A PulledPrompt."""

    def __init__(
        self,
        generation: NodeGeneration,
        engine: EngineClient,
        peers: KVPeers,
        metrics: DecodeMetrics,
        policy: HandoffPolicy,
    ) -> None:
        self.rid = generation.rid
        self.request_id = generation.message.request_id
        self.num_tokens = generation.num_handoff_tokens
        self._generation = generation
        self._engine = engine
        self._peers = peers
        self._metrics = metrics
        self._policy = policy
        self._uncached_tokens = 0  # tokens of the pull whose KV is not on D
        self._plan = NO_PULL

    def plan(self, cached_tokens: int) -> Pull | None:
        self._generation.trace.on_reserved()
        self._uncached_tokens = self.num_tokens - cached_tokens
        pull = self._prefix(cached_tokens) if self._generation.message.prefix_tokens else self._stream(cached_tokens)
        if pull is not None:
            self._plan = pull.plan
            self._metrics.handoffs.inc()
        return pull

    def _prefix(self, cached_tokens: int) -> Pull | None:
        """Return the pull of the tokens that the router expects the source to have."""
        expected = min(self._generation.message.prefix_tokens, self.num_tokens)
        plan = self._peers.plan_pull(expected - cached_tokens)
        if plan is None:
            self._metrics.local_prefills.inc()
            return None
        return Pull(plan, self._peers.pull_deadline(self._uncached_tokens))

    def _stream(self, cached_tokens: int) -> Pull | None:
        """Return the pull of a moved stream: the source has just computed its tokens."""
        generation = self._generation
        worth = self._policy.choose_handoff(
            self._uncached_tokens,
            generation.sampling.prompt_logprobs,
            lacks_pixels=generation.lacks_pixels(cached_tokens),
        )
        return Pull(NO_PULL, inf) if worth else None

    def decline(self) -> None:
        self._engine.send(PrefillLocally(self.rid))

    def ask(self, source: Peer) -> pb.PrefillRequest:
        span = self._generation.trace.start_handoff(source.node_id, self._uncached_tokens)
        plan = self._plan if self._plan.loaded else None
        span.set(pull_attributes(self._peers.costs, self._uncached_tokens, plan))
        return self._generation.prefill_request(span)

    def on_asked(self) -> None:
        if not self._plan.computed:  # the answer comes at once
            self._engine.send(HandoffEnds(self.rid, 0.0))

    def on_read_started(self) -> None:
        self._generation.trace.on_read_started()

    def on_read_ended(self, read: ReadResult) -> None:
        self._generation.trace.on_read_ended(read)

    def on_abandoned(self) -> None:
        """Do nothing: the generation's end has called, and its trace ends the spans."""

    def on_confirmed(self, confirmed: KVConfirmed, num_tokens: int) -> None:
        waited = time.monotonic() - self._generation.waits_since
        self._engine.send(msgspec.structs.replace(confirmed, waited=waited))
        self._generation.trace.on_pulled(num_tokens)
        self._generation.trace.on_confirmed()

    def on_failed(self, error: PdserveError) -> None:
        generation = self._generation
        if isinstance(error, EngineCrashed):
            error = PrefillCrashed(str(error))
        generation.trace.on_handoff_failed(error)
        if not self._policy.recompute_after(error, self._uncached_tokens, pull=True):
            generation.fail(error)
            return
        generation.trace.restart()
        level = logging.INFO if isinstance(error, Overloaded) else logging.WARNING
        text = "request %s is prefilled on this node: %s"
        _log.log(level, text, self.request_id or self.rid, error, extra=generation.trace.log_fields)
        self._engine.send(PrefillLocally(self.rid))
