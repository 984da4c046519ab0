"""The front's ear at the engine's heart, and its watch over itself.

    ready ──silent for half of --peer-timeout, or one turn without end──► stuck ──a beat──► ready

While the engine is stuck the node says so in Describe and to health checks, takes no request and ends those that run:
whoever waits is told in time, and may go elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from engine.ipc.messages import Beat

_LONGEST_TURN = 120.0  # seconds: no step takes so long, but a device or a lock that will never answer does


def nap_within(patience: float) -> float:
    """How long whoever watches sleeps between two looks, in seconds; a stall is measured to within this.

    Who has more patience looks less often: a hundred nodes on one machine would do little else.
    """
    return max(0.02, patience / 100)


class HeartbeatMonitor:
    """What is known of a process's life. Time in which this process itself stood still is no silence of the other."""

    def __init__(self, patience: float, who: str = "the engine process") -> None:
        self.last = Beat(0.0, 0.0, 0.0)
        self._who = who
        self._patience = patience  # seconds of silence
        self.nap = nap_within(patience)
        self.waits_for = ""  # which other ranks it has waited for since the beat before, in words
        self._silence = 0.0

    def beat(self, beat: Beat) -> None:
        self.waits_for = beat.waits_for if beat.waits_for == self.last.waits_for else ""
        self.last = beat
        self._silence = 0.0

    def pass_time(self, seconds: float) -> None:
        """So long nothing was heard, though somebody listened for at least one nap of it."""
        self._silence += min(seconds, 2 * self.nap)

    @property
    def trouble(self) -> str:
        """What is wrong with it, or with other ranks that only it hears; empty while nothing is."""
        if self._silence > self._patience:
            return f"{self._who} has given no sign of life for {self._patience:.3g} s"
        if self.last.turn > _LONGEST_TURN:
            waits_for = f": {self.waits_for}" if self.waits_for else ""
            return f"the engine has been in one step for {self.last.turn:.0f} s{waits_for}"
        return self.last.silent


class LivenessWatch:
    """Tells of trouble as it comes and goes, and measures how long the event loop could not run."""

    def __init__(self, pulse: HeartbeatMonitor) -> None:
        self.longest_gap = 0.0  # seconds
        self._pulse = pulse

    async def run(self, on_change: Callable[[str], Awaitable[None]]) -> None:
        """For ever. ``on_change`` is told of trouble, and with "" of its end."""
        said, before = "", time.monotonic()
        while True:
            await asyncio.sleep(self._pulse.nap)
            now = time.monotonic()
            self.longest_gap = max(self.longest_gap, now - before - self._pulse.nap)
            self._pulse.pass_time(now - before)
            before = now
            if bool(self._pulse.trouble) != bool(said):
                said = self._pulse.trouble
                await on_change(said)
