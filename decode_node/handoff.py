"""The handoff of one request: reserve on D → prefill on P → read by D → release, or recompute on D.

    reserved ─► worth it? ─► Prefill at P ─► first tokens ─► read ─► P confirms ─► decode
                   │ no          │ refused, broken     │ all      │ failed,   │ lease gone
                   ▼             ▼                     ▼ ended    ▼ late      ▼
             prefill here   ◄────┴─────────────────   done   ◄────┴───────────┘   (policy recompute; fail: an error)

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
from decode_node.peers import PrefillPeer
from decode_node.remote_prefill import RemotePrefill
from decode_node.settings import FailurePolicy, Settings
from engine.link import EngineLink
from engine.messages import Cancel, KVConfirmed, PrefillLocally, StartRead
from pdserve.errors import NodeError, Overloaded, PdserveError, PeerError
from pdserve.model_config import ModelConfig
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import Sample
from pdserve.wire import logprobs_from_pb, sampling_to_pb

_log = logging.getLogger(__name__)

_MARGIN_SHARE, _MARGIN_MAX = 0.1, 1.0  # D stops reading that much before a lease ends: a share of it, at most seconds


class ReadFailed(PeerError):
    """The connector's connection to the peer cannot be relied on."""


@dataclass(frozen=True, slots=True)
class Handoffs:
    """What every handoff of a node needs."""

    link: EngineLink
    settings: Settings
    model: ModelConfig
    counters: dict[str, float]
    background: Background

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
            self._give_up(generation, exc)

    async def _attempt(self, generation: Generation, peer: PrefillPeer, cached_tokens: int) -> None:
        """The handoff when all goes well; raises PdserveError when it does not."""
        epoch, name = peer.epoch, peer.node_id  # of this life of it
        request = _prefill_request(generation, epoch, cached_tokens)
        async with RemotePrefill(peer.stub, name, request, generation.remaining, self.background) as prefill:
            tokens = await prefill.first_tokens()
            started = time.monotonic()
            first = self._samples(tokens, generation.sampling.n, name)
            generation.emit_first(first, tokens.cached_tokens, self.model.eos_token_ids)
            if generation.ended:
                self.link.send(Cancel(generation.rid))  # it holds blocks for tokens that nobody waits for
                return
            ready = await prefill.kv_ready()
            order = StartRead(generation.rid, epoch, tuple(ready.block_ids), first)
            await self._read(generation, order, ready.lease_ms)
            if not await prefill.release():
                raise PeerError(f"the lease at {name} ended before its blocks had been read")
        self.link.send(KVConfirmed(generation.rid))
        self.counters["pdserve_handoff_exposed_seconds_total"] += time.monotonic() - started

    async def _read(self, generation: Generation, order: StartRead, lease_ms: int) -> None:
        """Read the leased blocks, or raise ReadFailed, at the latest a margin before the lease ends by our clock."""
        lease = lease_ms / 1000
        seconds = lease - min(_MARGIN_MAX, lease * _MARGIN_SHARE)
        self.link.send(order)
        try:
            read = await asyncio.wait_for(generation.read_ended, seconds)
        except TimeoutError as exc:
            raise ReadFailed(
                f"reading {len(order.remote_blocks)} blocks took longer than the {seconds:.3g} s that the lease leaves"
            ) from exc
        if read.error:
            raise ReadFailed(f"reading {len(order.remote_blocks)} blocks failed: {read.error}")
        self.counters["pdserve_kv_read_bytes_total"] += read.num_bytes
        self.counters["pdserve_kv_read_descriptors_total"] += read.num_descriptors
        self.counters["pdserve_kv_read_seconds_total"] += read.seconds

    def _give_up(self, generation: Generation, error: PdserveError) -> None:
        """What the failure policy says."""
        self.counters["pdserve_handoff_failures_total"] += 1
        if self.settings.failure_policy is FailurePolicy.FAIL:
            known = isinstance(error, Overloaded)  # else what went wrong between nodes is no fault of the client's
            generation.fail(error if known else NodeError(f"the handoff failed: {error}"))
            return
        self.counters["pdserve_handoff_recomputes_total"] += 1
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
