"""Sends the engine's heartbeat from its own thread, and measures stalls of the process.

    step loop         iteration ─┬─ in the runner (the device) ─┬─ rest: ``loop_gap``
    heartbeat sender  │ sleep │ sleep │ sleep │     sleep     │ a sleep that took too long: ``thread_gap``
                                       ▼ a Heartbeat to the frontend, twenty times per timeout

A stopped process, or a call that never releases the GIL, sends nothing: heartbeat_monitor.py notices the silence. A
heartbeat also carries the duration of the current iteration, so an endless step is noticed, and the number of commands
taken, so a step loop that hangs between two steps is noticed. The node's other ranks send theirs to the engine process,
which passes on the ranks that are silent.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pdserve.ipc.heartbeat_monitor import HeartbeatMonitor, poll_interval
from pdserve.ipc.messages import Heartbeat

_INTERVALS_PER_HEARTBEAT = 5


class LoopTimer:
    """Times the iterations of the step loop. The loop writes, the heartbeat sender reads.

    ``expected()`` is the time that the steps of the current iteration take, in seconds.
    """

    def __init__(self, expected: Callable[[], float] = lambda: 0.0) -> None:
        self.longest_gap = 0.0  # seconds of an iteration outside the runner
        self.iteration = 0  # number of the current one
        self._expected = expected
        self._is_step = True  # else the iteration does work of unknown duration
        self._began = 0.0  # 0.0: between iterations

    @property
    def elapsed(self) -> float:
        """Seconds since the current iteration began; 0.0 between iterations."""
        began = self._began  # read once: the step loop runs meanwhile
        return time.perf_counter() - began if began else 0.0

    @property
    def expected(self) -> float:
        """Seconds that the current iteration takes; inf if unknown."""
        return self._expected() if self._is_step else math.inf

    def begin(self) -> None:
        self.iteration += 1
        self._began = time.perf_counter()

    @contextmanager
    def other_work(self) -> Iterator[None]:
        """Time work that is no step: no duration is expected, and the iteration begins anew after it."""
        self._is_step = False
        try:
            yield
        finally:
            self._is_step = True
            self.begin()

    def end(self, in_runner: float) -> float:
        """End an iteration that spent ``in_runner`` seconds in the runner; return its duration in seconds."""
        elapsed = self.elapsed
        self._began = 0.0
        self.longest_gap = max(self.longest_gap, elapsed - in_runner)
        return elapsed


class HeartbeatSender:
    """``send`` raises OSError once the receiver has gone. ``timeout`` is the receiver's, in seconds of silence.

    ``monitors`` has one for each other rank of the node; ``waiting_for()`` names the ranks that a step waits for,
    ``num_taken()`` counts the messages that the step loop has taken.
    """

    def __init__(
        self,
        loop_timer: LoopTimer,
        send: Callable[[Heartbeat], None],
        timeout: float,
        monitors: Sequence[HeartbeatMonitor] = (),
        waiting_for: Callable[[], str] = lambda: "",
        num_taken: Callable[[], int] = lambda: 0,
    ) -> None:
        self._loop_timer = loop_timer
        self._send = send
        self._interval = poll_interval(timeout)
        self._monitors = monitors
        self._waiting_for = waiting_for
        self._num_taken = num_taken
        self._thread_gap = 0.0
        self._iteration = 0  # number of the current one
        self._iterated = 0.0  # seconds of it

    def start(self) -> None:
        threading.Thread(target=self._run, name="heartbeat sender", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                for _ in range(_INTERVALS_PER_HEARTBEAT):
                    self._sleep()
                self._send(self._heartbeat())
        except OSError:  # the receiver has gone, and this process ends with it
            return

    def _sleep(self) -> None:
        start = time.perf_counter()
        time.sleep(self._interval)
        slept = time.perf_counter() - start
        self._thread_gap = max(self._thread_gap, slept - self._interval)
        # Time in which this process did not run does not count.
        same = self._iteration == self._loop_timer.iteration
        self._iteration = self._loop_timer.iteration
        self._iterated = (self._iterated if same else 0.0) + min(slept, 2 * self._interval)
        for monitor in self._monitors:
            monitor.pass_time(slept)

    def _heartbeat(self) -> Heartbeat:
        silent = "; ".join(monitor.trouble for monitor in self._monitors if monitor.trouble)
        timer = self._loop_timer
        return Heartbeat(
            loop_gap=timer.longest_gap,
            thread_gap=self._thread_gap,
            iteration=min(timer.elapsed, self._iterated),
            silent_ranks=silent,
            waiting_for=self._waiting_for(),
            expected=timer.expected,
            num_taken=self._num_taken(),
        )
