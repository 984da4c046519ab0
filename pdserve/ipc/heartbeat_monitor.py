"""Monitors the heartbeats of another process: engine → frontend, other ranks → engine.

    ready ──no heartbeat, no command taken, or an endless step──► stuck ──heartbeat, command taken, step ends──► ready

The engine takes commands between two steps. How long the oldest one waits there tells whether the engine hangs; without
commands, the frontend sends Pings. While the engine is stuck, the node reports that in Describe and to health checks,
refuses requests and fails open ones, so that clients may retry elsewhere in time. Before a step counts as endless, the
node reports that it is stalled: it stays ready, but requests use other nodes if there are any.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec

from pdserve.ipc.messages import Heartbeat

# Seconds, and times the seconds that a step is expected to take. A hung device or a deadlock exceeds both.
_ENDLESS_SECONDS = 8.0
_ENDLESS_FACTOR = 20.0
_LONGEST_ITERATION = 120.0  # seconds, where nothing is expected: the first step of a kind compiles kernels
_UNTAKEN_SECONDS = 4.0  # a step loop takes commands at once between two steps
_STALLED_FACTOR = 10.0  # times the seconds that a step is expected to take
_PINGS_PER_TIMEOUT = 2


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
        self.ping_interval = timeout / _PINGS_PER_TIMEOUT  # seconds
        self.waiting_for = ""  # ranks that the last two heartbeats both waited for, in words
        self._name = name
        self._timeout = timeout
        self._silence = 0.0
        self._num_sent = 0  # commands
        self._oldest = 1  # number of the oldest command that may not be taken yet
        self._untaken = 0.0  # seconds that it has waited while no step ran

    def restart(self) -> None:
        """Monitor a new process."""
        self.last = Heartbeat(0.0, 0.0, 0.0)
        self.waiting_for = ""
        self._silence = self._untaken = 0.0
        self._num_sent = 0
        self._oldest = 1

    def resume(self) -> None:
        """Watch again, as the last heartbeat is out of date."""
        self.last = msgspec.structs.replace(self.last, iteration=0.0)
        self._silence = self._untaken = 0.0

    def sent(self) -> None:
        """Count a command to the process."""
        self._num_sent += 1

    @property
    def all_taken(self) -> bool:
        """Whether the process has taken all commands, as far as is known."""
        return self._num_sent < self._oldest

    def receive(self, heartbeat: Heartbeat) -> None:
        self.waiting_for = heartbeat.waiting_for if heartbeat.waiting_for == self.last.waiting_for else ""
        self.last = heartbeat
        self._silence = 0.0
        if heartbeat.iteration or heartbeat.num_taken >= self._oldest:
            self._oldest = heartbeat.num_taken + 1
            self._untaken = 0.0

    def pass_time(self, seconds: float) -> None:
        """Count ``seconds`` since the last check as silence, two intervals at most: the rest is our own stall."""
        passed = min(seconds, 2 * self.interval)
        self._silence += passed
        if not (self.all_taken or self.last.iteration):
            self._untaken += passed

    @property
    def trouble(self) -> str:
        """Description of the trouble with the process, or with the ranks that it monitors; empty without trouble."""
        if self._silence > self._timeout:
            return f"{self._name} has sent no heartbeat for {self._timeout:.3g} s"
        if self._untaken > max(_UNTAKEN_SECONDS, 2 * self._timeout):
            return f"{self._name} has taken no command for {self._untaken:.0f} s between two steps"
        endless = max(_ENDLESS_SECONDS, 4 * self._timeout, _ENDLESS_FACTOR * self.last.expected)
        if self.last.iteration > min(endless, _LONGEST_ITERATION):
            waiting_for = f": {self.last.waiting_for}" if self.last.waiting_for else ""
            return f"the engine has been in one step for {self.last.iteration:.0f} s{waiting_for}"
        return self.last.silent_ranks

    @property
    def stalled(self) -> bool:
        """Whether the step may be endless: it takes longer than --peer-timeout and many times the expected time."""
        return _STALLED_FACTOR * self.last.expected < self.last.iteration > 2 * self._timeout


class LivenessWatch:
    """Reports when trouble begins and ends, and measures how long the event loop could not run.

    ``ping`` sends the process a command.
    """

    def __init__(self, monitor: HeartbeatMonitor, ping: Callable[[], None]) -> None:
        self.longest_gap = 0.0  # seconds
        self._monitor = monitor
        self._ping = ping
        self._ping_at = 0.0

    async def run(self, on_change: Callable[[str], Awaitable[None]]) -> None:
        """Check until cancelled. ``on_change`` receives the trouble, and "" at its end."""
        self._monitor.resume()
        reported = ""
        before = time.monotonic()
        while True:
            await asyncio.sleep(self._monitor.interval)
            now = time.monotonic()
            self.longest_gap = max(self.longest_gap, now - before - self._monitor.interval)
            self._monitor.pass_time(now - before)
            before = now
            if now > self._ping_at and self._monitor.all_taken:
                self._ping()
                self._ping_at = now + self._monitor.ping_interval
            trouble = self._monitor.trouble
            if bool(trouble) != bool(reported):
                reported = trouble
                await on_change(reported)
