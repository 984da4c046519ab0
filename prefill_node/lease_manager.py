"""Keeps the lease table, its expiry timer and the engine's leased blocks consistent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from engine.frontend.engine_client import EngineClient
from engine.ipc.messages import FreeLease
from prefill_node.leases import LeaseState, LeaseTable
from prefill_node.prefill_trace import PrefillTrace

_log = logging.getLogger(__name__)


class LeaseManager:
    """The leases of a node. ``on_change`` is called after each lease that ends."""

    def __init__(self, engine: EngineClient, table: LeaseTable) -> None:
        self._engine = engine
        self.table = table
        self.on_change: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None
        self._on_end: dict[int, Callable[[], None]] = {}  # by lease
        self._traces: dict[int, PrefillTrace] = {}  # by lease

    @property
    def idle(self) -> bool:
        return not len(self.table)

    def accept(self, lease: int, on_end: Callable[[], None], trace: PrefillTrace) -> None:
        """Register the lease of a new prompt. ``on_end`` is called when it ends, unless ``cancel`` comes before."""
        self.table.accept(lease)
        self._on_end[lease] = on_end
        self._traces[lease] = trace

    def announce(self, lease: int, complete: bool) -> bool:
        """Lease more blocks; return False if the lease has ended and they must not be announced to D."""
        active = self.table.announce(lease, complete, time.monotonic())
        self._set_timer()
        return active

    def extend(self, epoch: str, lease: int) -> float:
        """Extend a lease; return the seconds that it lasts at least, 0 if it has ended."""
        return self.table.extend(epoch, lease, time.monotonic())

    def release(self, epoch: str, lease: int) -> bool:
        """End a lease for D; return whether it stood until now."""
        stood, free = self.table.release(epoch, lease)
        if free:
            self._free(lease, LeaseState.RELEASED if stood else LeaseState.ABORTED)
        return stood

    def cancel(self, lease: int) -> None:
        """End the lease of a cancelled prompt, unless blocks have been announced."""
        self._on_end.pop(lease, None)
        if self.table.cancel(lease):
            self._free(lease, LeaseState.ABORTED)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for trace in self._traces.values():
            trace.on_lease_end(LeaseState.ABORTED)
        self._traces.clear()

    def _set_timer(self) -> None:
        when = self.table.next_expiry()
        if self._timer is None and when is not None:
            delay = max(0.0, when - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        for lease in self.table.expire(time.monotonic()):
            trace = self._traces[lease]
            text = "lease %d of request %s expired: its decode node neither released nor extended it"
            _log.warning(text, lease, trace.request_id, extra=trace.log_fields)
            self._free(lease, LeaseState.EXPIRED)
        self._set_timer()

    def _free(self, lease: int, state: LeaseState) -> None:
        """Free the blocks of a lease that has ended, and stop its computation."""
        self._engine.send(FreeLease(lease))
        on_end = self._on_end.pop(lease, None)
        if on_end is not None:
            on_end()
        self._traces.pop(lease).on_lease_end(state)
        self.on_change()
