"""Prompts of peers in the engine, until their leases end. A peer is the reader of a stream.

This module leases cached blocks and computes nothing; prefill_node/prefill.py adds prompts that P computes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from node.engine_client.client import EngineClient
from node.engine_client.request_events import Event, error_of
from node.leasing.leases import Lease, LeaseId, LeaseState, LeaseTable
from node.leasing.prompt_trace import PromptTrace
from pdserve.errors import DeadlineExceeded, PdserveError, PeerError
from pdserve.ipc.messages import Cancel, Fetched, FreeLease, LeaseCached, Leased, Refused
from pdserve.kv.states import NO_SLOT
from pdserve.logprobs import TokenLogprobs
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import FinishReason
from pdserve.rpc.errors import failure_to_pb
from pdserve.rpc.protobuf import images_from_pb
from pdserve.sampling_params import SamplingParams

_log = logging.getLogger(__name__)


class LeasedPrompt(Lease):
    """A prompt in the engine, with its lease. ``send`` gets its events for the peer."""

    def __init__(
        self, lease: LeaseId, prompts: LeasedPrompts, *, trace: PromptTrace, send: Callable[[pb.PrefillEvent], None]
    ) -> None:
        super().__init__(lease)
        self.trace = trace
        self.cancelled = False  # only its lease remains
        self.rid = prompts.engine.open(self)
        self._prompts = prompts
        self._send_event = send
        self._timer: asyncio.TimerHandle | None = None
        prompts.table.accept(self)

    def after_step(self, action: Callable[[], None]) -> None:
        """Run ``action`` once the step in flight has ended, if it computes for this prompt."""
        action()

    def cancel(self) -> None:
        """Stop the computation without further events. Announced blocks stay leased."""
        self.cancelled = True
        self._stop()
        self._prompts.engine.send(Cancel(self.rid))
        self._prompts.end_ungranted(self)

    def fail(self, error: PdserveError) -> None:
        """Cancel the prompt, and tell the peer why."""
        self.trace.on_failed(error)
        self.cancel()
        self._send(failed=failure_to_pb(error))
        self._prompts.on_change()

    def on_lease_end(self, state: LeaseState) -> None:
        """The lease has ended and the blocks are free."""
        if not self.cancelled:
            if state is LeaseState.REVOKED:
                self._send(released=pb.Released(revoked=True))
            elif not self.complete:
                error = PeerError("the lease ended before all of its blocks were announced")
                self.trace.on_failed(error)
                self._send(failed=failure_to_pb(error))
            self._stop()
        self.trace.on_lease_end(state)

    # ------------------------------------------------------------ events of the engine

    def on_event(self, event: Event) -> None:
        match event:
            case Fetched():
                self.trace.on_fetched(event)
            case Leased() if self._prompts.announce(self, event.last):
                self._on_part(event)
            case Refused():
                self._on_refused(error_of(event))

    def on_token(self, choice: int, token_id: int, finish: FinishReason | None, logprobs: TokenLogprobs | None) -> None:
        raise AssertionError("a token of a prompt that is not computed")

    def _on_part(self, part: Leased) -> None:
        """Announce blocks."""
        self.trace.on_part(part.num_tokens, len(part.block_ids))
        if self.complete:
            self._stop_timer()
            self._on_complete(part)
        ready = pb.KVReady(
            lease_ms=int(self._prompts.table.seconds * 1000),
            block_ids=part.block_ids,
            num_tokens=part.num_tokens,
            digests=part.digests,
            state_slot=None if part.state_slot == NO_SLOT else part.state_slot,
        )
        self._send(kv_ready=ready)
        if self.complete:
            self._send(finished=pb.Finished())

    def _on_complete(self, part: Leased) -> None:
        """The last blocks are about to be announced."""

    def _on_refused(self, error: PdserveError) -> None:
        if not self.complete:
            self.fail(error)

    # ------------------------------------------------------------ helpers

    def _send(self, **kind: Any) -> None:
        """Queue an event for the peer; ``kind`` is the field that is set."""
        self._send_event(pb.PrefillEvent(request=self.id.request, **kind))

    def _set_deadline(self, timeout_ms: int) -> None:
        """Fail the prompt after this time; 0: never."""
        if timeout_ms:
            seconds = timeout_ms / 1000
            self._timer = asyncio.get_running_loop().call_later(seconds, self._on_deadline, seconds)

    def _on_deadline(self, seconds: float) -> None:
        text = f"the prompt was not computed within the {seconds:.3g} s left of its request's timeout"
        self.fail(DeadlineExceeded(text))

    def _stop(self) -> None:
        """Ignore the engine from now on."""
        self._prompts.engine.close(self.rid)
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class CachedPrompt(LeasedPrompt):
    """A pull: the cached blocks of a prompt are leased at once, and nothing is computed."""

    def submit(self, request: pb.PrefillRequest) -> None:
        self._set_deadline(request.timeout_ms)
        pull = LeaseCached(
            rid=self.rid,
            token_ids=request.token_ids,
            cache_salt=request.cache_salt,
            skip_tokens=request.skip_tokens,
            kv_layers=request.kv_layers,
            images=images_from_pb(request.images),
            adapter=request.sampling.adapter,
        )
        self._prompts.engine.send(pull)

    def on_event(self, event: Event) -> None:
        match event:
            case Leased(block_ids=()):
                self._on_nothing_cached()
            case _:
                super().on_event(event)

    def _on_complete(self, part: Leased) -> None:
        self.trace.on_pulled(part.num_tokens)

    def _on_nothing_cached(self) -> None:
        """End without blocks: nothing was promised."""
        self.trace.on_pulled(0)
        self.cancel()
        self._send(finished=pb.Finished())
        self._prompts.on_change()


class LeasedPrompts:
    """The prompts of all peers. Keeps leases, their expiry and the engine's leased blocks consistent.

    ``on_change`` is called after each prompt and each lease that ends.
    """

    def __init__(self, engine: EngineClient, seconds: float, guard: float) -> None:
        """Leases last ``seconds``; their blocks are kept ``guard`` seconds longer."""
        self.engine = engine
        self.table: LeaseTable[LeasedPrompt] = LeaseTable(seconds, guard)
        self.on_change: Callable[[], None] = lambda: None
        engine.on_revoke = self.revoke
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def idle(self) -> bool:
        return not len(self.table)

    def of_stream(self, stream: int) -> Iterator[LeasedPrompt]:
        """Yield the prompts of a stream that are computed or decode ahead."""
        return (prompt for prompt in self.table if prompt.id.stream == stream and not prompt.cancelled)

    def announce(self, prompt: LeasedPrompt, complete: bool) -> bool:
        """Lease more blocks; return False if the lease has ended and they must not be announced to the peer."""
        active = self.table.announce(prompt.id, complete, time.monotonic())
        self._set_timer()
        return active

    def extend(self, lease: LeaseId) -> float:
        """Extend a lease; return the seconds that it lasts at least, 0 if it has ended."""
        return self.table.extend(lease, time.monotonic())

    def after_step(self, lease: LeaseId, action: Callable[[], None]) -> None:
        """Run ``action`` once the step in flight has ended, if it computes for this lease."""
        prompt = self.table.get(lease)
        if prompt is None:
            action()
        else:
            prompt.after_step(action)

    def release(self, lease: LeaseId) -> bool:
        """End a lease for the peer; return whether it stood until now."""
        prompt = self.table.get(lease)
        stood, _ = self.table.release(lease)
        if prompt is not None:
            self._free(prompt, LeaseState.RELEASED if stood else LeaseState.ABORTED)
        return stood

    def revoke(self, rid: int) -> None:
        """End the lease of a pull, whose blocks the engine needs, and tell its reader. No release says that it stood.

        If it has ended meanwhile, the blocks are free in a moment.
        """
        prompt = next((leased for leased in self.table if leased.rid == rid), None)
        if prompt is not None and self.table.revoke(prompt.id):
            trace = prompt.trace
            text = "the lease of request %s is taken back: requests of this node lack its blocks"
            _log.info(text, trace.request_id, extra=trace.log_fields)
            self._free(prompt, LeaseState.REVOKED)

    def end_ungranted(self, prompt: LeasedPrompt) -> None:
        """End the lease of a cancelled prompt, unless blocks have been announced."""
        if self.table.cancel(prompt.id):
            self._free(prompt, LeaseState.ABORTED)

    def end_all(self) -> None:
        """End the granted leases, as their blocks are about to be lost: no later release reports that they stood."""
        for prompt in self.table.expire(math.inf):
            self._free(prompt, LeaseState.EXPIRED)

    def close(self) -> None:
        """End the traces of all leases. Streams that gRPC cancels afterwards change nothing."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._closed:
            self._closed = True
            for prompt in self.table:
                prompt.trace.on_lease_end(LeaseState.ABORTED)

    def _set_timer(self) -> None:
        when = self.table.next_expiry()
        if self._timer is None and when is not None:
            delay = max(0.0, when - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        for prompt in self.table.expire(time.monotonic()):
            trace = prompt.trace
            text = "the lease of request %s expired: its reader neither released nor extended it"
            _log.warning(text, trace.request_id, extra=trace.log_fields)
            self._free(prompt, LeaseState.EXPIRED)
        self._set_timer()

    def _free(self, prompt: LeasedPrompt, state: LeaseState) -> None:
        """Free the blocks of a lease that has ended, and stop its computation."""
        if self._closed:
            return
        self.engine.send(FreeLease(prompt.rid))
        prompt.on_lease_end(state)
        self.on_change()


class StartPrefill(Protocol):
    """Compute a prompt for a peer. Raises PdserveError before the prompt is registered, or not at all."""

    def __call__(
        self,
        prompts: LeasedPrompts,
        lease: LeaseId,
        request: pb.PrefillRequest,
        sampling: SamplingParams,
        *,
        trace: PromptTrace,
        send: Callable[[pb.PrefillEvent], None],
    ) -> None: ...
