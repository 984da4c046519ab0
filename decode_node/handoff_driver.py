"""Begins and drives the handoffs of D, this decode node: executes the actions that node/reading/handoff.py decides on.

``Handoffs`` decides who computes a prompt: D, P, or D after a pull (node/reading/pull_driver.py). ``HandoffDriver`` has
P compute it, and forwards P's tokens.

                              ┌─ part announced: read it while P computes the next ─┐
reserved ─► worth it? ─► prefill at P ─► first tokens ─► last part ─► all read ─► P confirms ─► decode
               │ no          │ refused, broken                      │ a part     │ lease ended
               ▼             ▼                                      ▼ failed     ▼
         prefill on D   ◄────┴──────────────────────────────────────┴────────────┘   (recompute; or an error)

P is the prefill node. If it drains before it has announced a part or sent first tokens, another P gets the prompt. If
all choices end with the tokens that P samples, the request is over, and the handoff is abandoned.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgspec

from decode_node.decode_metrics import DecodeMetrics
from decode_node.generation import NodeGeneration
from decode_node.handoff_policy import HandoffPolicy, named_peer
from decode_node.pulled_generation import PulledGeneration
from node.context import NodeContext
from node.reading.handoff import Event, Handoff
from node.reading.handoff_executor import HandoffExecutor
from node.reading.peer import KVPeer
from node.reading.peers import KVPeers
from node.reading.pull_driver import PullDriver
from pdserve.errors import Draining, ImagesMissing, NodeError, Overloaded, PdserveError, PeerError, PrefillCrashed
from pdserve.ipc.messages import Cancel, HandoffEnds, KVConfirmed, PrefillLocally, ReadEnded, StartRead
from pdserve.logprobs import logprobs_fault
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import Sample
from pdserve.rpc.protobuf import logprobs_from_pb

_log = logging.getLogger(__name__)


class Handoffs:
    """All handoffs and pulls of D."""

    def __init__(self, node: NodeContext, peers: KVPeers, metrics: DecodeMetrics, policy: HandoffPolicy) -> None:
        self.node = node
        self.peers = peers
        self.metrics = metrics
        self.policy = policy

    def submit(self, generation: NodeGeneration, prefill_node: str) -> None:
        """Send a request to the engine: with a handoff or pull from the named node, or without."""
        if not prefill_node:
            self.metrics.local_prefills.inc()
        lacks_pixels = generation.lacks_pixels(0)
        if not prefill_node or not self.policy.choose_handoff(
            generation.num_handoff_tokens, generation.sampling.prompt_logprobs, lacks_pixels=lacks_pixels
        ):
            generation.submit_local()
            return
        try:
            peer = named_peer(self.peers, prefill_node, only=lacks_pixels)
        except PdserveError as exc:
            if self.policy.recompute_after(exc, generation.num_handoff_tokens):
                generation.submit_local()
            else:
                generation.fail(exc)
            return
        driver = self._pull(generation, peer) if generation.message.pull else HandoffDriver(self, generation, peer)
        generation.submit_handoff(driver.on_engine_event, driver.abandon)

    def _pull(self, generation: NodeGeneration, source: KVPeer) -> PullDriver:
        prompt = PulledGeneration(generation, self.node.engine, self.peers, self.metrics, self.policy)
        return PullDriver(self.node, self.peers, source, prompt)


class HandoffDriver(HandoffExecutor):
    """One request from its submission until it decodes, has ended, or is prefilled on D.

    An unexpected exception ends this request only.
    """

    def __init__(self, handoffs: Handoffs, generation: NodeGeneration, peer: KVPeer) -> None:
        super().__init__(handoffs.node, peer, generation.rid)
        self._handoffs = handoffs
        self._generation = generation
        self._uncached_tokens = 0  # tokens of the handoff whose KV is not on D

    @property
    def _name(self) -> str | int:
        """The request in logs."""
        return self._generation.message.request_id or self._generation.rid

    def _start(self, cached_tokens: int) -> None:
        """Hand the prompt off, or prefill it on D if too few tokens lack KV."""
        generation = self._generation
        generation.trace.on_reserved()
        self._uncached_tokens = generation.num_handoff_tokens - cached_tokens
        lacks_pixels = generation.lacks_pixels(cached_tokens)
        prompt_logprobs = generation.sampling.prompt_logprobs
        if not self._handoffs.policy.choose_handoff(self._uncached_tokens, prompt_logprobs, lacks_pixels=lacks_pixels):
            self._engine.send(PrefillLocally(generation.rid))
            self._ended = True
            return
        self._handoffs.metrics.handoffs.inc()
        self._prefill_at(self._peer)

    def _prefill_at(self, peer: KVPeer) -> None:
        """Raises PdserveError when the prompt cannot be sent."""
        assert self._handoff is None or not self._handoff.active, "a drained P's events would reach the next handoff"
        self._handoff = None
        self._peer = peer
        generation = self._generation
        stream = self._open_stream()
        span = generation.trace.start_handoff(stream.peer.node_id, self._uncached_tokens)
        num_tokens = generation.num_handoff_tokens
        self._begin(generation.prefill_request(span), num_tokens - self._uncached_tokens, num_tokens)

    def _advance(self, event: Event) -> None:
        handoff = self._handoff
        assert handoff is not None, "events follow the prompt that is sent to P"
        if isinstance(event, pb.PrefillEvent) and event.failed.code == pb.Failure.CRASHED:
            raise PrefillCrashed(f"{self._peer.address}: {event.failed.message}")
        if handoff.active:
            match event:
                case ReadEnded():
                    self._generation.trace.on_read_ended(event.result)
                case pb.PrefillEvent() if event.HasField("last_chunk"):
                    self._engine.send(HandoffEnds(self._generation.rid, event.last_chunk.ends_in_ms / 1000))
                case pb.PrefillEvent() if event.HasField("first_tokens"):
                    self._emit_first_tokens(handoff, event.first_tokens)
                case pb.PrefillEvent() if event.HasField("next_token"):
                    self._emit_next_token(handoff, event.next_token)
        super()._advance(event)

    def _start_read(self, order: StartRead) -> None:
        self._generation.trace.on_read_started()
        super()._start_read(order)

    def _confirm(self, confirmed: KVConfirmed) -> None:
        self._ended = True
        waited = time.monotonic() - self._generation.waits_since
        self._engine.send(msgspec.structs.replace(confirmed, waited=waited))
        self._generation.trace.on_confirmed()

    def _fail(self, error: PdserveError) -> None:
        """Try another P if this one drains and has sent nothing yet; else apply the failure policy."""
        handoffs = self._handoffs
        generation = self._generation
        generation.trace.on_handoff_failed(error)
        begun = self._handoff is not None and (self._handoff.announced or self._handoff.outputs)
        may_switch = isinstance(error, Draining) and not begun and not generation.images  # another P lacks the pixels
        if may_switch and (other := handoffs.peers.other()) is not None:
            generation.trace.restart()
            self._guard(self._prefill_at, other)
            return
        self.abandon()
        self._check_peer(error)
        if not handoffs.policy.recompute_after(error, self._uncached_tokens):
            # Other errors between nodes are not the client's fault.
            passed_on = isinstance(error, Overloaded | PrefillCrashed | ImagesMissing)
            generation.fail(error if passed_on else NodeError(f"the handoff failed: {error}"))
            return
        generation.trace.restart()
        level = logging.INFO if isinstance(error, Overloaded) else logging.WARNING
        fields = generation.trace.log_fields
        _log.log(level, "request %s is prefilled on this node: %s", self._name, error, extra=fields)
        outputs = self._handoff.outputs if self._handoff is not None else ()
        self._engine.send(PrefillLocally(generation.rid, outputs))

    def _on_exception(self, error: Exception) -> None:
        generation = self._generation
        _log.exception("the handoff of request %s failed", self._name, extra=generation.trace.log_fields)
        try:
            self.abandon()
        finally:
            generation.fail(NodeError("the handoff failed; the decode node's log has the reason"))

    def _emit_first_tokens(self, handoff: Handoff, tokens: pb.FirstTokens) -> None:
        generation = self._generation
        model = self._node.config.model
        first = self._samples(tokens.choices, generation.prefill_sampling.n)
        handoff.add_first_tokens([sample.token_id for sample in first])
        generation.trace.on_first_tokens(tokens.queued_ms / 1000)
        if generation.resume:
            return  # the client has these tokens
        for choice, sample in enumerate(first):
            generation.emit_peer_token(
                choice,
                sample,
                number=1,
                eos_token_ids=model.eos_token_ids,
                cached_tokens=0 if choice else min(tokens.cached_tokens, generation.num_handoff_tokens),
            )
        self._free_if_ended()

    def _emit_next_token(self, handoff: Handoff, token: pb.SampledToken) -> None:
        """Emit a token that P decoded ahead while D reads the KV."""
        generation = self._generation
        model = self._node.config.model
        (sample,) = self._samples([token], 1)
        number = handoff.add_next_token(sample.token_id, generation.prefill_sampling.max_tokens)
        self._handoffs.metrics.ahead_tokens.inc()
        generation.emit_peer_token(0, sample, number, eos_token_ids=model.eos_token_ids)
        self._free_if_ended()

    def _samples(self, tokens: Sequence[pb.SampledToken], n: int) -> tuple[Sample, ...]:
        """Convert tokens of P. Raises PeerError unless there are ``n``, all within the vocabulary, as asked for."""
        peer = self._peer.address
        vocab_size = self._node.config.model.vocab_size
        if len(tokens) != n:
            raise PeerError(f"{peer} sent the first tokens of {len(tokens)} choices instead of {n}")
        largest = max(token.token_id for token in tokens)
        if largest >= vocab_size:
            raise PeerError(f"{peer} sent token {largest}; the largest token id is {vocab_size - 1}")
        for token in tokens:
            if fault := logprobs_fault(token.logprobs, self._generation.sampling.logprobs, vocab_size):
                raise PeerError(f"{peer} sent {fault}")
        return tuple(
            Sample(token.token_id, logprobs_from_pb(token.logprobs) if token.HasField("logprobs") else None)
            for token in tokens
        )

    def _free_if_ended(self) -> None:
        if self._generation.ended:
            self._engine.send(Cancel(self._generation.rid))
