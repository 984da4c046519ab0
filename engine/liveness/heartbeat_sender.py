"""The engine's heartbeat, on a thread of its own: it shows that the process runs, and measures what held it up.

    step loop  turn ─┬─ in the runner (the device) ─┬─ the rest: ``loop_gap``       nothing may hold it up
    heart      │ nap │ nap │ nap │      nap      │ nap │   a nap too long: ``thread_gap``, no thread of Python could run
                                 ▼ a Beat to the front, twenty times in its patience

A process that is stopped, and a call that never lets go of the interpreter, are silent; what the front makes of that is
in engine/liveness/heartbeat_monitor.py. A step loop that never comes back from a turn is told with the beat.

Other ranks of the node have hearts of their own, which beat for the engine process: it passes on whom it does not hear.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from engine.ipc.messages import Beat
from engine.liveness.heartbeat_monitor import HeartbeatMonitor, nap_within

_NAPS_PER_BEAT = 5


class LoopTimer:
    """The step loop's turns, timed by itself; the heart only looks."""

    def __init__(self) -> None:
        self.longest_gap = 0.0  # seconds of a turn outside of the runner
        self._began = 0.0  # 0.0: it waits for work

    @property
    def lasting(self) -> float:
        """How long the present turn has lasted, in seconds; 0.0 between turns."""
        began = self._began  # read once: the step loop goes on meanwhile
        return time.perf_counter() - began if began else 0.0

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self, in_runner: float) -> float:
        """``in_runner`` is how many seconds of the turn the runner took. Returns how long it lasted."""
        lasted, self._began = self.lasting, 0.0
        self.longest_gap = max(self.longest_gap, lasted - in_runner)
        return lasted


class HeartbeatSender:
    """``send`` takes a beat, and raises OSError once nobody is there to hear it.

    ``patience`` is how long its silence is believed to be nothing, in seconds. ``others`` are the pulses of the node's
    other ranks; ``waits_for`` says which of them a step waits for.
    """

    def __init__(
        self,
        turns: LoopTimer,
        send: Callable[[Beat], None],
        patience: float,
        others: Sequence[HeartbeatMonitor] = (),
        waits_for: Callable[[], str] = lambda: "",
    ) -> None:
        self._turns = turns
        self._send = send
        self._pause = nap_within(patience)
        self._others = others
        self._waits_for = waits_for
        self._thread_gap = 0.0

    def start(self) -> None:
        threading.Thread(target=self._run, name="heart", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                for _ in range(_NAPS_PER_BEAT):
                    self._nap()
                self._send(self._beat())
        except OSError:  # the other end has gone, and this process goes with it
            return

    def _nap(self) -> None:
        start = time.perf_counter()
        time.sleep(self._pause)
        slept = time.perf_counter() - start
        self._thread_gap = max(self._thread_gap, slept - self._pause)
        for other in self._others:
            other.pass_time(slept)

    def _beat(self) -> Beat:
        silent = "; ".join(other.trouble for other in self._others if other.trouble)
        return Beat(self._turns.longest_gap, self._thread_gap, self._turns.lasting, silent, self._waits_for())
