"""Keeps the lease table, its expiry timer and the engine's leased blocks consistent."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from node.engine_client import EngineClient
from pdserve.ipc.messages import FreeLease
from prefill_node.leases import LeaseId, LeaseState, LeaseTable
from prefill_node.prefill_trace import PrefillTrace

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Prompt:
    """A prompt whose lease is active."""

    rid: int  # in the engine
    on_end: Callable[[], None] | None  # None: its computation was cancelled
    trace: PrefillTrace


class LeaseManager:
    """The leases of a node. ``on_change`` is called after each lease that ends."""

    def __init__(self, engine: EngineClient, table: LeaseTable) -> None:
        self._engine = engine
        self.table = table
        self.on_change: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None
        self._prompts: dict[LeaseId, _Prompt] = {}  # the table's keys, until ``close``

    @property
    def idle(self) -> bool:
        return not len(self.table)

    def accept(self, lease: LeaseId, rid: int, on_end: Callable[[], None], trace: PrefillTrace) -> None:
        """Register the lease of a new prompt. ``on_end`` is called when it ends, unless ``cancel`` comes before."""
        self.table.accept(lease)
        self._prompts[lease] = _Prompt(rid, on_end, trace)

    def announce(self, lease: LeaseId, complete: bool) -> bool:
        """Lease more blocks; return False if the lease has ended and they must not be announced to D."""
        active = self.table.announce(lease, complete, time.monotonic())
        self._set_timer()
        return active

    def extend(self, lease: LeaseId) -> float:
        """Extend a lease; return the seconds that it lasts at least, 0 if it has ended."""
        return self.table.extend(lease, time.monotonic())

    def release(self, lease: LeaseId) -> bool:
        """End a lease for D; return whether it stood until now."""
        stood, free = self.table.release(lease)
        if free:
            self._free(lease, LeaseState.RELEASED if stood else LeaseState.ABORTED)
        return stood

    def cancel(self, lease: LeaseId) -> None:
        """End the lease of a cancelled prompt, unless blocks have been announced."""
        if (prompt := self._prompts.get(lease)) is not None:
            prompt.on_end = None
        if self.table.cancel(lease):
            self._free(lease, LeaseState.ABORTED)

    def end_all(self) -> None:
        """End the granted leases, as their blocks are about to be lost: no release of them says that they stood."""
        for lease in self.table.expire(math.inf):
            self._free(lease, LeaseState.EXPIRED)

    def close(self) -> None:
        """End the traces of all leases. Streams that gRPC cancels afterwards change nothing."""
        if self._timer is not None:
            self._timer.cancel()
        for prompt in self._prompts.values():
            prompt.trace.on_lease_end(LeaseState.ABORTED)
        self._prompts.clear()

    def _set_timer(self) -> None:
        when = self.table.next_expiry()
        if self._timer is None and when is not None:
            delay = max(0.0, when - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        for lease in self.table.expire(time.monotonic()):
            trace = self._prompts[lease].trace
            text = "the lease of request %s expired: its decode node neither released nor extended it"
            _log.warning(text, trace.request_id, extra=trace.log_fields)
            self._free(lease, LeaseState.EXPIRED)
        self._set_timer()

    def _free(self, lease: LeaseId, state: LeaseState) -> None:
        """Free the blocks of a lease that has ended, and stop its computation."""
        prompt = self._prompts.pop(lease, None)
        if prompt is None:
            return  # closed
        self._engine.send(FreeLease(prompt.rid))
        if prompt.on_end is not None:
            prompt.on_end()
        prompt.trace.on_lease_end(state)
        self.on_change()
