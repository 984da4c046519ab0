"""The engine's heartbeat, on a thread of its own: it shows that the process runs, and measures what held it up.

    step loop  turn ─┬─ in the runner (the device) ─┬─ the rest: ``loop_gap``       nothing may hold it up
    heart      │ nap │ nap │ nap │      nap      │ nap │   a nap too long: ``thread_gap``, no thread of Python could run
                                 ▼ a Beat to the front, ten times a second

A process that is stopped, and a call that never lets go of the interpreter, are silent; what the front makes of that is
in engine/pulse.py. A step loop that never comes back from a turn is told with the beat.
"""

from __future__ import annotations

import socket
import threading
import time

import msgspec

from engine.messages import FRAME_HEADER, Beat

_NAP = 0.02  # seconds; a stall is measured to within this
_NAPS_PER_BEAT = 5


class Turns:
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


class Heart:
    def __init__(self, sock: socket.socket, turns: Turns) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._turns = turns
        self._encoder = msgspec.msgpack.Encoder()
        self._thread_gap = 0.0

    def start(self) -> None:
        threading.Thread(target=self._run, name="heart", daemon=True).start()

    def _run(self) -> None:
        while True:
            for _ in range(_NAPS_PER_BEAT):
                due = time.perf_counter() + _NAP
                time.sleep(_NAP)
                self._thread_gap = max(self._thread_gap, time.perf_counter() - due)
            body = self._encoder.encode(Beat(self._turns.longest_gap, self._thread_gap, self._turns.lasting))
            try:
                self._socket.send(FRAME_HEADER.pack(len(body)) + body)
            except BlockingIOError:  # the front is stopped, and has beats enough
                continue
            except OSError:  # it has gone, and this process goes with it
                return
