"""The handoff of one request: reserve on D → prefill on P → read by D → release, or recompute on D.

                                  ┌─ part announced: read it, while P computes the next ─┐
    reserved ─► worth it? ─► Prefill at P ─► first tokens ─► last part ─► all read ─► P confirms ─► decode
                   │ no          │ refused, broken     │ all            │ a part     │ lease gone
                   ▼             ▼                     ▼ ended          ▼ failed     ▼
             prefill here   ◄────┴─────────────────   done   ◄──────────┴────────────┘   (recompute; or fail: an error)

No token is computed from a read that P has not confirmed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from decode_node.background import Background
from decode_node.cost import worth_handoff
from decode_node.generation import Generation
from decode_node.metrics import Metrics
from decode_node.peers import PrefillPeer
from decode_node.remote_prefill import PrefillEvent, RemotePrefill
from decode_node.settings import FailurePolicy, Settings
from engine.link import EngineLink
from engine.messages import Cancel, KVConfirmed, PrefillLocally, ReadEnded, StartRead
from pdserve.errors import NodeError, Overloaded, PdserveError, PeerError
from pdserve.model_config import ModelConfig
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import Sample
from pdserve.wire import logprobs_from_pb, sampling_to_pb

_log = logging.getLogger(__name__)

_MARGIN_SHARE, _MARGIN_MAX = 0.1, 1.0  # D stops reading that much before a lease ends: a share of it, at most seconds


Inbox = asyncio.Queue[PrefillEvent | ReadEnded]  # what P and our engine say of one handoff


class ReadFailed(PeerError):
    """The connector's connection to the peer cannot be relied on."""


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
        async with RemotePrefill(peer.stub, name, request, remaining, background, inbox.put_nowait) as prefill:
            with peer.telling(inbox.put_nowait):
                started = await self._receive(generation, inbox, epoch, name)
            if generation.ended:
                self.link.send(Cancel(generation.rid))  # it holds blocks for tokens that nobody waits for
                return
            if not await prefill.release():
                raise PeerError(f"the lease at {name} ended before its blocks had been read")
        self.link.send(KVConfirmed(generation.rid, generation.first))
        self.metrics.exposed.observe(time.monotonic() - started)

    async def _receive(self, generation: Generation, inbox: Inbox, epoch: str, peer: str) -> float:
        """Read what P announces as it comes and pass its first tokens on, until all is here or no choice goes on.

        Returns when the first tokens came. Raises ReadFailed when a part cannot be read, at the latest a margin before
        the lease ends by our clock.
        """
        announced = num_reads = 0  # prompt tokens; parts under way
        seconds = started = 0.0
        try:
            async with asyncio.timeout(None) as limit:
                while announced < generation.num_tokens or num_reads:
                    match await inbox.get():
                        case pb.FirstTokens() as tokens:
                            started = time.monotonic()
                            self._emit_first(generation, tokens, peer)
                            if generation.ended:
                                return started
                        case pb.KVReady() as ready:
                            blocks, announced = tuple(ready.block_ids), ready.num_tokens
                            self.link.send(StartRead(generation.rid, epoch, blocks, announced, tuple(ready.digests)))
                            num_reads += 1
                            if announced >= generation.num_tokens:  # the lease's time runs from now on
                                seconds = _reading_seconds(ready.lease_ms)
                                limit.reschedule(asyncio.get_running_loop().time() + seconds)
                        case ReadEnded() as read:
                            num_reads -= 1
                            if read.num_corrupt:
                                raise PeerError(f"what was read from {peer} is corrupt: {read.error}")
                            if read.error:
                                raise ReadFailed(f"reading KV failed: {read.error}")
                        case PdserveError() as error if announced < generation.num_tokens:
                            raise error
        except TimeoutError as exc:
            raise ReadFailed(f"reading took longer than the {seconds:.3g} s that the lease leaves") from exc
        if not generation.first:
            raise PeerError(f"{peer} announced a whole prompt without first tokens")
        return started

    def _emit_first(self, generation: Generation, tokens: pb.FirstTokens, peer: str) -> None:
        if generation.first:
            raise PeerError(f"{peer} sent first tokens twice")
        first = self._samples(tokens, generation.sampling.n, peer)
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


def _reading_seconds(lease_ms: int) -> float:
    """How long to read under a lease at most."""
    lease = lease_ms / 1000
    return lease - min(_MARGIN_MAX, lease * _MARGIN_SHARE)
