"""Prompts on their way through P's engine, and the leases they become, part by part."""

from __future__ import annotations

import asyncio
import logging
import time

from engine.link import EngineLink, Event, error_of
from engine.messages import Cancel, FreeLease, Leased, Mode, Output, Refused, Submit
from pdserve.errors import PdserveError, PeerError
from pdserve.records import Sample, SamplingParams
from prefill_node.leases import LeaseTable

_log = logging.getLogger(__name__)


class PendingPrefill:
    """One prompt of ``num_tokens``: its blocks part by part, and with the last one the first token of each choice.

    Its lease begins with the first part and its time runs from the last one, however slowly the peer takes them in.
    """

    def __init__(self, link: EngineLink, leases: Leases, num_tokens: int) -> None:
        self._link = link
        self._leases = leases
        self._granted = False
        self.rid = link.open(self._on_event)
        self.num_tokens = num_tokens
        self.samples: list[Sample] = []  # by choice
        self.cached_tokens = 0
        self._parts: asyncio.Queue[Leased | PdserveError] = asyncio.Queue()

    def submit(self, token_ids: bytes, sampling: SamplingParams, cache_salt: str, skip_tokens: int) -> None:
        self._link.send(Submit(self.rid, token_ids, sampling, Mode.LEASE, cache_salt, skip_tokens))

    async def next_part(self) -> Leased:
        """The next blocks that the engine has leased. Raises what it refused the prompt with."""
        part = await self._parts.get()
        if isinstance(part, PdserveError):
            raise part
        return part

    def close(self) -> None:
        """No more events; blocks that the engine leases from now on are freed as unclaimed. Idempotent."""
        self._link.close(self.rid)

    def _on_event(self, event: Event) -> None:
        match event:
            case Output():
                if event.sample is not None:
                    self.samples.append(event.sample)
                self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
            case Leased():
                self._parts.put_nowait(event)
                if not self._granted:
                    self._granted = True
                    self._leases.grant(self.rid)
                if event.num_tokens == self.num_tokens:
                    self._leases.start(self.rid)
                    self.close()
            case Refused():
                self._parts.put_nowait(error_of(event))
                self.close()


class Leases:
    """The lease table, its timer and the engine that holds the blocks, kept in step."""

    def __init__(self, link: EngineLink, table: LeaseTable) -> None:
        self._link = link
        self.table = table
        self._timer: asyncio.TimerHandle | None = None
        link.on_unclaimed = self._on_unclaimed

    def grant(self, lease: int) -> None:
        """A peer is told of a prompt's first blocks."""
        self.table.grant(lease)

    def start(self, lease: int) -> None:
        """It is told of the last ones."""
        self.table.start(lease, time.monotonic())
        self._arm()

    def check(self, lease: int) -> None:
        """Raise PeerError unless the lease stands."""
        if lease not in self.table:
            raise PeerError(f"lease {lease} ended before all of its blocks were announced")

    def release(self, lease: int) -> bool:
        """Give a lease back. Returns whether it stood until then."""
        self._expire()  # an expired lease must not look like a standing one because a timer is late
        stood, free = self.table.release(lease)
        if free:
            self._link.send(FreeLease(lease))
        return stood

    def abort(self, lease: int) -> None:
        """The peer hung up before it was told of the whole lease, or while it was."""
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
