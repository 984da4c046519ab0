"""Brings requests through their handoffs: the driver of decode_node/handoff.py, which decides.

                              ┌─ part announced: read it, while P computes the next ─┐
reserved ─► worth it? ─► prefill at P ─► first tokens ─► last part ─► all read ─► P confirms ─► decode
               │ no          │ refused, broken     │ all            │ a part     │ lease gone
               ▼             ▼                     ▼ ended          ▼ failed     ▼
         prefill here   ◄────┴─────────────────   done   ◄──────────┴────────────┘   (recompute; or fail: an error)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from decode_node.decode_metrics import DecodeMetrics
from decode_node.generation import NodeGeneration
from decode_node.handoff import Ask, Event, Handoff, Phase, ReadFailed
from decode_node.prefill_peer import PrefillPeer
from decode_node.prefill_peers import PrefillPeers
from decode_node.remote_prefill import RemotePrefill
from decode_node.settings import DecodeSettings, FailurePolicy
from engine.frontend.engine_client import EngineClient
from engine.ipc.messages import Cancel, Mode, PrefillLocally, ReadEnded, StartRead
from pdserve.config.model_config import ModelConfig
from pdserve.errors import Draining, NodeError, Overloaded, PdserveError, PeerError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import Sample
from pdserve.request_cost import worth_handoff
from pdserve.rpc.protobuf import logprobs_from_pb, sampling_to_pb
from pdserve.tracing.spans import Span

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HandoffDriver:
    """What every handoff of a node needs."""

    link: EngineClient
    peers: PrefillPeers
    settings: DecodeSettings
    model: ModelConfig
    metrics: DecodeMetrics

    @property
    def counters(self) -> dict[str, float]:
        return self.metrics.counters

    def begin(self, generation: NodeGeneration, peer: PrefillPeer) -> None:
        """Reserve blocks here and hand it off, unless it turns out not to be worth it."""
        generation.handoff = Driver(self, generation, peer)
        generation.submit(Mode.HANDOFF)


class Driver:
    """From Submit(HANDOFF) to a request that decodes, has ended, or is prefilled here.

    Everything is done in the callback that brings the reason for it, be it P, the engine or the clock. A mistake of
    ours ends this request, and only that.
    """

    def __init__(self, node: HandoffDriver, generation: NodeGeneration, peer: PrefillPeer) -> None:
        self._node = node
        self._generation = generation
        self._peer = peer
        self._handoff: Handoff | None = None  # these two from the reservation on
        self._prefill: RemotePrefill | None = None
        self._announced = False  # P has announced blocks
        self._lacking = 0  # tokens of the prompt whose KV is not here
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    def on_reserved(self, cached_tokens: int) -> None:
        self._do(self._start, cached_tokens)

    def on_event(self, event: Event | pb.FirstTokens | pb.SampledToken) -> None:
        """What P or our engine say of it, or, with None, that time has passed."""
        self._do(self._take, event)

    def fail(self, error: PdserveError) -> None:
        """Give up, and do what the failure policy says. Idempotent."""
        if self._over:
            return
        if isinstance(error, Draining) and not self._announced and (other := self._node.peers.other()) is not None:
            self._generation.course.on_handoff_failed(error)
            self._generation.course.begin_anew()
            self._do(self._ask, other)
            return
        self.abandon()
        if isinstance(error, ReadFailed):
            self._peer.reset(str(error))
        elif isinstance(error, PeerError):
            self._peer.check()
        node, generation = self._node, self._generation
        node.counters["pdserve_handoff_failures_total"] += 1
        generation.course.on_handoff_failed(error)
        if node.settings.failure_policy is FailurePolicy.FAIL:
            known = isinstance(error, Overloaded)  # else what went wrong between nodes is no fault of the client's
            generation.fail(error if known else NodeError(f"the handoff failed: {error}"))
            return
        generation.course.begin_anew()
        node.counters["pdserve_handoff_recomputes_total"] += 1
        node.counters["pdserve_handoff_recomputed_tokens_total"] += self._lacking
        name, extra = generation.request_id or generation.rid, generation.course.about
        _log.warning("request %s is prefilled here: %s", name, error, extra=extra)
        node.link.send(PrefillLocally(generation.rid, self._handoff.outputs if self._handoff is not None else ()))

    def abandon(self) -> None:
        """P gets back what it holds. Idempotent."""
        if not self._over:
            self._end()
            if self._prefill is not None:
                self._prefill.give_up()

    def _do(self, step: Callable[[T], None], value: T) -> None:
        if self._over:
            return
        try:
            step(value)
        except PdserveError as exc:
            self.fail(exc)
        except Exception:
            name, extra = self._generation.request_id or self._generation.rid, self._generation.course.about
            _log.exception("the handoff of %s failed", name, extra=extra)
            self.abandon()
            self._generation.fail(NodeError("the handoff failed for a reason that the decode node's log tells"))

    def _start(self, cached_tokens: int) -> None:
        node, generation = self._node, self._generation
        generation.course.on_reserved()
        self._lacking = generation.num_tokens - cached_tokens
        if not worth_handoff(self._lacking, node.settings.handoff_min_tokens):
            node.counters["pdserve_local_prefills_total"] += 1
            node.link.send(PrefillLocally(generation.rid))
            self._end()
            return
        node.counters["pdserve_handoffs_total"] += 1
        self._ask(self._peer)

    def _ask(self, peer: PrefillPeer) -> None:
        """Have P compute the prompt; or another one, since the first has not begun and ends."""
        if self._prefill is not None:
            self._prefill.give_up()
        self._peer, generation = peer, self._generation
        stream = peer.stream
        if stream is None:
            raise PeerError(f"{peer.address} was lost while the request waited for room")
        self._handoff = Handoff(
            generation.rid, stream.epoch, stream.peer, generation.num_tokens, asked_at=time.monotonic()
        )
        cached_tokens = generation.num_tokens - self._lacking
        span = generation.course.hand_off(stream.peer, self._lacking)
        self._prefill = stream.prefill(_prefill_request(generation, cached_tokens, span), self)

    def _take(self, event: Event | pb.FirstTokens | pb.SampledToken) -> None:
        handoff = self._handoff
        assert handoff is not None
        match event:
            case pb.FirstTokens():
                self._pass_on_first(handoff, event)
            case pb.SampledToken():
                self._pass_on_next(handoff, event)
            case _:
                self._go_on(handoff, event)

    def _go_on(self, handoff: Handoff, event: Event) -> None:
        """Do what follows from an event. Raises PdserveError when that is to give up."""
        assert self._prefill is not None
        self._announced = self._announced or isinstance(event, pb.KVReady)
        course = self._generation.course
        if isinstance(event, ReadEnded):
            course.on_read_ended(event.num_bytes, event.num_descriptors)
        for action in handoff.on(event, time.monotonic()):
            if action is Ask.EXTEND:
                self._prefill.extend()
            elif action is Ask.RELEASE:
                self._prefill.release()
            else:
                if isinstance(action, StartRead):
                    course.on_read_begun()
                self._node.link.send(action)
        if handoff.phase is Phase.CONFIRMED:
            self._end()
            course.on_confirmed()
        else:
            self._wake_at(handoff.wake_at)

    def _pass_on_first(self, handoff: Handoff, tokens: pb.FirstTokens) -> None:
        generation, model = self._generation, self._node.model
        first = _samples(tokens.choices, generation.prefill_sampling.n, model.vocab_size, self._peer.address)
        handoff.sampled([sample.token_id for sample in first])
        generation.course.on_first_tokens(tokens.queued_ms / 1000)
        if generation.resume:
            return
        for choice, sample in enumerate(first):
            generation.emit_of_peer(choice, sample, 1, model.eos_token_ids, 0 if choice else tokens.cached_tokens)
        self._free_if_ended()

    def _pass_on_next(self, handoff: Handoff, token: pb.SampledToken) -> None:
        """P goes ahead while its KV is on the way."""
        generation, model = self._generation, self._node.model
        (sample,) = _samples([token], 1, model.vocab_size, self._peer.address)
        number = handoff.went_ahead(sample.token_id, generation.prefill_sampling.max_tokens)
        self._node.counters["pdserve_handoff_ahead_tokens_total"] += 1
        generation.emit_of_peer(0, sample, number, model.eos_token_ids)
        self._free_if_ended()

    def _free_if_ended(self) -> None:
        if self._generation.ended:
            self._node.link.send(Cancel(self._generation.rid))  # it holds blocks for tokens that nobody waits for

    def _wake_at(self, when: float) -> None:
        """Have ``on_event(None)`` called then (monotonic seconds), if nothing else happens before."""
        self._stop_timer()
        if when < inf:
            delay = max(0.0, when - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self.on_event, None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._over = True
        self._stop_timer()


def _prefill_request(generation: NodeGeneration, cached_tokens: int, span: Span) -> pb.PrefillRequest:
    remaining = generation.remaining
    return pb.PrefillRequest(
        request_id=generation.request_id,
        token_ids=generation.token_ids,
        sampling=sampling_to_pb(generation.prefill_sampling),
        cache_salt=generation.cache_salt,
        priority=generation.priority,
        skip_tokens=cached_tokens,
        timeout_ms=0 if remaining is None else max(1, int(remaining * 1000)),
        traceparent=span.traceparent,
        tracestate=span.tracestate,
    )


def _samples(tokens: Sequence[pb.SampledToken], n: int, vocab_size: int, peer: str) -> tuple[Sample, ...]:
    if len(tokens) != n:
        raise PeerError(f"{peer} sent the first tokens of {len(tokens)} choices instead of {n}")
    largest = max(token.token_id for token in tokens)
    if largest >= vocab_size:
        raise PeerError(f"{peer} sent token {largest}; the largest there is is {vocab_size - 1}")
    return tuple(
        Sample(token.token_id, logprobs_from_pb(token.logprobs) if token.HasField("logprobs") else None)
        for token in tokens
    )
