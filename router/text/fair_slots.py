"""Slots at workers of the router, fair between clients: processes and threads for slow work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from time import monotonic

from pdserve.fairness.fair_turns import FairTurns

CLIENT = ContextVar("client", default="")  # fairness_key of the HTTP request that a task serves


class FairSlots:
    """A client holds at most all slots but one, so that its long work never delays the work of another client alone."""

    def __init__(self, num_slots: int) -> None:
        self._turns = FairTurns[str, asyncio.Future[None]](num_slots)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot and hold it."""
        client = CLIENT.get()
        granted = asyncio.get_running_loop().create_future()
        self._turns.push(client, granted)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._turns.remove(client, granted)
            else:
                self._end(client, 0.0)
            raise
        begun = monotonic()
        try:
            yield
        finally:
            self._end(client, monotonic() - begun)

    def _end(self, client: str, seconds: float) -> None:
        self._turns.end(client, seconds)
        self._grant()

    def _grant(self) -> None:
        while (turn := self._turns.begin()) is not None:
            turn[1].set_result(None)
