"""Monitors the heartbeats of another process: engine → frontend, other ranks → engine.

    ready ──no heartbeat for half of --peer-timeout, or an endless iteration──► stuck ──heartbeat──► ready

While the engine is stuck, the node reports that in Describe and to health checks, refuses requests and fails open ones,
so that clients may retry elsewhere in time. Long before a step counts as endless, the node reports that it is stalled:
it stays ready, but requests use other nodes if there are any.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from engine.ipc.messages import Heartbeat

_LONGEST_ITERATION = 120.0  # seconds; no step takes so long, but a hung device or a deadlock does
_STALLED_STEPS = 10.0  # full steps


def poll_interval(timeout: float) -> float:
    """Return the seconds between two checks of a heartbeat; a stall is measured to within this.

    It grows with ``timeout``: with a fixed one, a hundred nodes on one machine would do little else.
    """
    return max(0.02, timeout / 100)


class HeartbeatMonitor:
    """Liveness of one process. Time in which the monitoring process itself did not run does not count as silence."""

    def __init__(self, timeout: float, name: str = "the engine process") -> None:
        """``timeout`` is in seconds of silence."""
        self.last = Heartbeat(0.0, 0.0, 0.0)
        self.interval = poll_interval(timeout)
        self.waiting_for = ""  # ranks that the last two heartbeats both waited for, in words
        self._name = name
        self._timeout = timeout
        self._silence = 0.0

    def receive(self, heartbeat: Heartbeat) -> None:
        self.waiting_for = heartbeat.waiting_for if heartbeat.waiting_for == self.last.waiting_for else ""
        self.last = heartbeat
        self._silence = 0.0

    def pass_time(self, seconds: float) -> None:
        """Count ``seconds`` since the last check as silence, two intervals at most: the rest is our own stall."""
        self._silence += min(seconds, 2 * self.interval)

    @property
    def trouble(self) -> str:
        """Describe what is wrong with the process, or with the ranks that it monitors; empty while nothing is."""
        if self._silence > self._timeout:
            return f"{self._name} has sent no heartbeat for {self._timeout:.3g} s"
        if self.last.iteration > _LONGEST_ITERATION:
            waiting_for = f": {self.last.waiting_for}" if self.last.waiting_for else ""
            return f"the engine has been in one step for {self.last.iteration:.0f} s{waiting_for}"
        return self.last.silent_ranks

    def stalled(self, full_step: float) -> bool:
        """Return whether the step may be endless: it is longer than --peer-timeout and many full steps.

        ``full_step`` is in seconds by the steps measured so far; 0.0: none is measured, and the first compiles kernels.
        """
        return 0.0 < full_step * _STALLED_STEPS < self.last.iteration > 2 * self._timeout


class LivenessWatch:
    """Reports when trouble begins and ends, and measures how long the event loop could not run."""

    def __init__(self, monitor: HeartbeatMonitor) -> None:
        self.longest_gap = 0.0  # seconds
        self._monitor = monitor

    async def run(self, on_change: Callable[[str], Awaitable[None]]) -> None:
        """Check until cancelled. ``on_change`` receives the trouble, and "" at its end."""
        reported, before = "", time.monotonic()
        while True:
            await asyncio.sleep(self._monitor.interval)
            now = time.monotonic()
            self.longest_gap = max(self.longest_gap, now - before - self._monitor.interval)
            self._monitor.pass_time(now - before)
            before = now
            trouble = self._monitor.trouble
            if bool(trouble) != bool(reported):
                reported = trouble
                await on_change(reported)
