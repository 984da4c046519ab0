"""Brings requests through their handoffs: the driver of decode_node/handoff.py, which decides.

                              ┌─ part announced: read it, while P computes the next ─┐
reserved ─► worth it? ─► Prefill at P ─► first tokens ─► last part ─► all read ─► P confirms ─► decode
               │ no          │ refused, broken     │ all            │ a part     │ lease gone
               ▼             ▼                     ▼ ended          ▼ failed     ▼
         prefill here   ◄────┴─────────────────   done   ◄──────────┴────────────┘   (recompute; or fail: an error)
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from math import inf

from decode_node.background import Background
from decode_node.cost import worth_handoff
from decode_node.generation import Generation
from decode_node.handoff import Ask, Event, Handoff, Phase, ReadFailed, Released
from decode_node.metrics import Metrics
from decode_node.peers import PrefillPeer
from decode_node.remote_prefill import RemotePrefill
from decode_node.settings import FailurePolicy, Settings
from engine.link import EngineLink
from engine.messages import Cancel, PrefillLocally
from pdserve.errors import NodeError, Overloaded, PdserveError, PeerError
from pdserve.model_config import ModelConfig
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import Sample
from pdserve.wire import logprobs_from_pb, sampling_to_pb

_log = logging.getLogger(__name__)

Inbox = asyncio.Queue[Event | pb.FirstTokens]  # what P and our engine say of one handoff


@dataclass(frozen=True, slots=True)
class Handoffs:
    """What every handoff of a node needs."""

    link: EngineLink
    settings: Settings
    model: ModelConfig
    metrics: Metrics
    background: Background

    @property
    def counters(self) -> dict[str, float]:
        return self.metrics.counters

    async def run(self, generation: Generation, peer: PrefillPeer) -> None:
        """From Submit(HANDOFF) to a request that decodes, has ended, or is prefilled here."""
        cached = await generation.reserved
        if not worth_handoff(generation.num_tokens - cached, self.settings.handoff_min_tokens):
            self.counters["pdserve_local_prefills_total"] += 1
            self.link.send(PrefillLocally(generation.rid))
            return
        self.counters["pdserve_handoffs_total"] += 1
        try:
            if not peer.connected:
                raise PeerError(f"{peer.address} was lost while the request waited for room")
            await self._attempt(generation, peer, cached)
        except PdserveError as exc:
            if isinstance(exc, ReadFailed):
                peer.reset(str(exc))
            elif isinstance(exc, PeerError):
                peer.check()
            self._give_up(generation, exc, generation.num_tokens - cached)

    async def _attempt(self, generation: Generation, peer: PrefillPeer, cached_tokens: int) -> None:
        """The handoff when all goes well; raises PdserveError when it does not."""
        epoch, name = peer.epoch, peer.node_id  # of this life of it
        request = _prefill_request(generation, epoch, cached_tokens)
        inbox: Inbox = asyncio.Queue()
        generation.on_read = inbox.put_nowait
        remaining, background = generation.remaining, self.background
        started = 0.0  # when the first tokens came
        handoff = Handoff(generation.rid, epoch, name, generation.num_tokens, time.monotonic())
        async with RemotePrefill(peer.stub, name, request, remaining, background, inbox.put_nowait) as prefill:
            with peer.telling(inbox.put_nowait):
                while handoff.phase is not Phase.CONFIRMED:
                    event = await _next(inbox, handoff.wake_at)
                    if not isinstance(event, pb.FirstTokens):
                        await self._go_on(handoff, event, prefill, inbox)
                        continue
                    started = time.monotonic()
                    self._pass_on(generation, handoff, event, name)
                    if generation.ended:
                        self.link.send(Cancel(generation.rid))  # it holds blocks for tokens that nobody waits for
                        return
        self.metrics.exposed.observe(time.monotonic() - started)

    async def _go_on(self, handoff: Handoff, event: Event, prefill: RemotePrefill, inbox: Inbox) -> None:
        """Do what follows from an event. Raises PdserveError when that is to give up."""
        for action in handoff.on(event, time.monotonic()):
            if action is Ask.EXTEND:
                prefill.extend()
            elif action is Ask.RELEASE:
                inbox.put_nowait(Released(await prefill.release()))
            else:
                self.link.send(action)

    def _pass_on(self, generation: Generation, handoff: Handoff, tokens: pb.FirstTokens, peer: str) -> None:
        first = self._samples(tokens, generation.sampling.n, peer)
        handoff.sampled(first)
        generation.emit_first(first, tokens.cached_tokens, self.model.eos_token_ids)

    def _give_up(self, generation: Generation, error: PdserveError, num_tokens: int) -> None:
        """What the failure policy says. The prompt lacks the KV of ``num_tokens``."""
        self.counters["pdserve_handoff_failures_total"] += 1
        if self.settings.failure_policy is FailurePolicy.FAIL:
            known = isinstance(error, Overloaded)  # else what went wrong between nodes is no fault of the client's
            generation.fail(error if known else NodeError(f"the handoff failed: {error}"))
            return
        self.counters["pdserve_handoff_recomputes_total"] += 1
        self.counters["pdserve_handoff_recomputed_tokens_total"] += num_tokens
        _log.warning("request %s is prefilled here: %s", generation.request_id or generation.rid, error)
        self.link.send(PrefillLocally(generation.rid, generation.first))

    def _samples(self, tokens: pb.FirstTokens, n: int, peer: str) -> tuple[Sample, ...]:
        if len(tokens.choices) != n:
            raise PeerError(f"{peer} sent the first tokens of {len(tokens.choices)} choices instead of {n}")
        largest = max(choice.token_id for choice in tokens.choices)
        if largest >= self.model.vocab_size:
            raise PeerError(f"{peer} sent token {largest}; the largest there is is {self.model.vocab_size - 1}")
        return tuple(
            Sample(choice.token_id, logprobs_from_pb(choice.logprobs) if choice.HasField("logprobs") else None)
            for choice in tokens.choices
        )


def _prefill_request(generation: Generation, epoch: str, cached_tokens: int) -> pb.PrefillRequest:
    return pb.PrefillRequest(
        request_id=generation.request_id,
        epoch=epoch,
        token_ids=generation.token_ids,
        sampling=sampling_to_pb(generation.sampling),
        cache_salt=generation.cache_salt,
        skip_tokens=cached_tokens,
    )


async def _next(inbox: Inbox, wake_at: float) -> Event | pb.FirstTokens:
    """The next event, or None when ``wake_at`` (monotonic seconds) comes first."""
    try:
        async with asyncio.timeout(max(0.0, wake_at - time.monotonic()) if wake_at < inf else None):
            return await inbox.get()
    except TimeoutError:
        return None
