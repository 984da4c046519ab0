"""Prompts on their way through P's engine, and the leases they become."""

from __future__ import annotations

import asyncio
import logging
import time

from engine.link import EngineLink, Event, error_of
from engine.messages import Cancel, FreeLease, Leased, Mode, Output, Refused, Submit
from pdserve.errors import PdserveError
from pdserve.records import Sample, SamplingParams
from prefill_node.leases import LeaseTable

_log = logging.getLogger(__name__)


class PendingPrefill:
    """One prompt. Awaiting ``done`` gives the lease, or raises what the engine refused it with."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self.rid = link.open(self._on_event)
        self.samples: list[Sample] = []  # by choice
        self.cached_tokens = 0
        self.done: asyncio.Future[Leased] = asyncio.get_running_loop().create_future()

    def submit(self, token_ids: bytes, sampling: SamplingParams, cache_salt: str, skip_tokens: int) -> None:
        self._link.send(Submit(self.rid, token_ids, sampling, Mode.LEASE, cache_salt, skip_tokens))

    def close(self) -> None:
        """No more events; a lease that the engine grants from now on is freed as unclaimed. Idempotent."""
        self._link.close(self.rid)

    def _on_event(self, event: Event) -> None:
        match event:
            case Output():
                if event.sample is not None:
                    self.samples.append(event.sample)
                self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
            case Leased():
                self._settle(event)
            case Refused():
                self._settle(error_of(event))

    def _settle(self, outcome: Leased | PdserveError) -> None:
        self.close()
        if self.done.done():  # the call has been cancelled in this very turn of the event loop
            if isinstance(outcome, Leased):
                self._link.on_unclaimed(outcome)
        elif isinstance(outcome, Leased):
            self.done.set_result(outcome)
        else:
            self.done.set_exception(outcome)


class Leases:
    """The lease table, its timer and the engine that holds the blocks, kept in step."""

    def __init__(self, link: EngineLink, table: LeaseTable) -> None:
        self._link = link
        self.table = table
        self._timer: asyncio.TimerHandle | None = None
        link.on_unclaimed = self._on_unclaimed

    def grant(self, lease: int) -> None:
        self.table.grant(lease, time.monotonic())
        self._arm()

    def release(self, lease: int) -> bool:
        """Give a lease back. Returns whether it stood until then."""
        self._expire()  # an expired lease must not look like a standing one because a timer is late
        stood, free = self.table.release(lease)
        if free:
            self._link.send(FreeLease(lease))
        return stood

    def abort(self, lease: int) -> None:
        """The peer was never told of this lease, or hung up while it was told."""
        if self.table.abort(lease):
            self._link.send(FreeLease(lease))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _on_unclaimed(self, event: Event) -> None:
        if isinstance(event, Leased):
            self._link.send(FreeLease(event.rid))

    def _arm(self) -> None:
        """Have one timer run while anything is leased."""
        when = self.table.next_expiry()
        if self._timer is None and when is not None:
            delay = max(0.0, when - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._expire()
        self._arm()

    def _expire(self) -> None:
        for lease in self.table.expire(time.monotonic()):
            _log.warning("lease %d expired after %.3g s: its blocks are free again", lease, self.table.seconds)
            self._link.send(FreeLease(lease))


def cancel(link: EngineLink, prefill: PendingPrefill) -> None:
    """Stop a prompt whose caller is gone, wherever it is."""
    prefill.close()
    link.send(Cancel(prefill.rid))
