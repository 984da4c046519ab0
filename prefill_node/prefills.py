"""Prompts on their way through P's engine, and the leases they become, part by part."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from engine.link import EngineLink, Event, error_of
from engine.messages import Cancel, FreeLease, Leased, Mode, Output, Refused, Submit
from pdserve.errors import PdserveError, PeerError
from pdserve.records import Sample, SamplingParams
from prefill_node.leases import LeaseTable

_log = logging.getLogger(__name__)


class PendingPrefill:
    """One prompt of ``num_tokens``: its blocks part by part, and with the last one the first token of each choice.

    Its lease begins with the first part, however slowly the peer takes them in.
    """

    def __init__(self, link: EngineLink, leases: Leases, num_tokens: int) -> None:
        self._link = link
        self._leases = leases
        self.rid = link.open(self._on_event)
        self.num_tokens = num_tokens
        self.samples: list[Sample] = []  # by choice
        self.cached_tokens = 0
        self._parts: asyncio.Queue[Leased | PdserveError] = asyncio.Queue()
        leases.accept(self.rid, self._on_lease_end)

    def submit(self, token_ids: bytes, sampling: SamplingParams, cache_salt: str, skip_tokens: int) -> None:
        self._link.send(Submit(self.rid, token_ids, sampling, Mode.LEASE, cache_salt, skip_tokens))

    async def next_part(self) -> Leased:
        """The next blocks that the engine has leased. Raises what it refused the prompt with, or PeerError when the
        lease has ended meanwhile.
        """
        part = await self._parts.get()
        if isinstance(part, PdserveError):
            raise part
        return part

    def hang_up(self) -> None:
        """Stop it, wherever it is: its caller is gone, or it was refused. What was announced stays leased."""
        self._link.close(self.rid)
        self._link.send(Cancel(self.rid))
        self._leases.hang_up(self.rid)

    def _on_event(self, event: Event) -> None:
        match event:
            case Output():
                if event.sample is not None:
                    self.samples.append(event.sample)
                self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
            case Leased():
                complete = event.num_tokens == self.num_tokens
                if self._leases.announce(self.rid, complete):
                    self._parts.put_nowait(event)
                if complete:
                    self._link.close(self.rid)
            case Refused():
                self._parts.put_nowait(error_of(event))
                self._link.close(self.rid)

    def _on_lease_end(self) -> None:
        """The lease has ended, maybe before all blocks were announced: nobody needs the rest."""
        self._link.close(self.rid)
        self._parts.put_nowait(PeerError(f"lease {self.rid} ended before all of its blocks were announced"))


class Leases:
    """The lease table, its timer and the engine that holds the blocks, kept in step."""

    def __init__(self, link: EngineLink, table: LeaseTable) -> None:
        self._link = link
        self.table = table
        self._timer: asyncio.TimerHandle | None = None
        self._on_end: dict[int, Callable[[], None]] = {}  # by lease, until all of its blocks have been announced

    def accept(self, lease: int, on_end: Callable[[], None]) -> None:
        """A prompt is to become a lease. ``on_end`` is called when that ends before all blocks were announced."""
        self.table.accept(lease)
        self._on_end[lease] = on_end

    def announce(self, lease: int, complete: bool) -> bool:
        """A peer is to be told of more blocks. False when the lease has ended: it must not be."""
        stands = self.table.announce(lease, complete, time.monotonic())
        if stands and complete:
            del self._on_end[lease]
        self._arm()
        return stands

    def extend(self, epoch: str, lease: int) -> float:
        """Keep a lease. Returns for how many seconds from now at least; 0 when it has ended."""
        return self.table.extend(epoch, lease, time.monotonic())

    def release(self, epoch: str, lease: int) -> bool:
        """Give a lease back. Returns whether it was kept until then."""
        kept, free = self.table.release(epoch, lease)
        if free:
            self._free(lease)
        return kept

    def hang_up(self, lease: int) -> None:
        """The call has ended that a lease was for."""
        if self.table.hang_up(lease):
            self._free(lease)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        """Have one timer run while anything is leased."""
        when = self.table.next_expiry()
        if self._timer is None and when is not None:
            delay = max(0.0, when - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        for lease in self.table.expire(time.monotonic()):
            _log.warning("lease %d expired: its peer has not given it back nor extended it", lease)
            self._free(lease)
        self._arm()

    def _free(self, lease: int) -> None:
        """The blocks of a lease that has ended are free; what the engine still computes for it is not wanted."""
        on_end = self._on_end.pop(lease, None)
        if on_end is not None:
            self._link.send(Cancel(lease))
            on_end()
        self._link.send(FreeLease(lease))
