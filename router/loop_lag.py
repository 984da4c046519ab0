"""Lag of the event loop's timers: the time for which one request can delay all others."""

from __future__ import annotations

import asyncio
import time

from pdserve.metrics import FastHistogram

_INTERVAL = 0.01  # seconds


class LoopLag:
    """Observes the loop's lag in seconds, a hundred times a second while it runs."""

    def __init__(self, lags: FastHistogram) -> None:
        self._lags = lags
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._armed = time.monotonic()  # uvloop's own clock stands still within an iteration
        self._timer = asyncio.get_running_loop().call_later(_INTERVAL, self._tick)

    def close(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self._lags.observe(max(0.0, time.monotonic() - self._armed - _INTERVAL))
        self.start()
