"""Child processes of ``pdserve up``: start, watch, replace and stop them.

Each child leads a session of its own. So Ctrl-C reaches only the parent, which stops the children in order, and the
parent can kill a child's whole process group (a node's engine too). A child gets

    status fd     to write one JSON object per line: listening, loading, ready, failed (pdserve/host/process.py)
    lifeline fd   the child ends when this pipe closes, so it never outlives its parent
    stdout+stderr one pipe; the parent relays each line under the child's name
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pdserve.logs import level_of, message_of

STOP_EACH = 1.0  # seconds between the stop signal to one group of children and the signal to the next
FAILED_EXIT = 10.0  # seconds that a child has to exit once it has reported a failure
STOP_ALL = 3.0  # seconds after the first stop signal until the remaining children are killed

State = Literal["starting", "loading", "ready", "failed", "ended"]


class _Lines:
    """Split the bytes of a non-blocking pipe into lines."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._rest = b""

    def read(self) -> tuple[list[str], bool]:
        """Return the complete lines that have arrived, and whether the pipe is closed."""
        data = os.read(self.fd, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines = [*lines, self._rest]
            self._rest = b""
        return [line.decode(errors="replace") for line in lines], not data


@dataclass
class Child:
    """A child process and its last reported state."""

    name: str
    module: str
    process: subprocess.Popen[bytes]
    lifeline: int
    started: float = field(default_factory=time.monotonic)
    state: State = "starting"
    stage: str = ""
    fraction: float = -1.0  # progress of the stage, 0 … 1; -1 if unknown
    address: str = ""  # host:port, once it listens
    ready_at: float = 0.0  # monotonic seconds; 0 before
    kv_tokens: int = 0  # size of the KV cache of a ready node
    error: str = ""
    failed_with: int = 0  # exit status of a reported failure; 0 before
    failed_at: float = 0.0  # monotonic seconds; 0 before
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=20))

    def update(self, line: str) -> None:
        """Apply one line of the status pipe."""
        status = json.loads(line)
        match status["state"]:
            case "listening":
                self.address = status["address"]
            case "loading":
                self.state = "loading"
                self.stage = status["stage"]
                self.fraction = status["fraction"]
            case "ready":
                self.state = "ready"
                self.stage = ""
                self.fraction = -1.0
                self.kv_tokens = status["kv_tokens"]
                self.ready_at = time.monotonic()
            case "failed":
                self.state = "failed"
                self.error = status["error"]
                self.failed_with = status["status"]
                self.failed_at = time.monotonic()

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def has_reported(self, text: str) -> bool:
        """Return whether a line of its output repeats the error that it has reported."""
        return bool(self.error) and message_of(text).startswith(f"pdserve: error: {self.error}")

    @property
    def last_error(self) -> str:
        """The error it reported, or else the last line it printed that is not routine."""
        printed = [line for line in self.last_lines if line.strip() and level_of(line) != "INFO"]
        return self.error or (message_of(printed[-1]) if printed else "it printed no error")


@dataclass(frozen=True)
class Printed:
    child: Child
    text: str


@dataclass(frozen=True)
class Changed:
    """The child's state, stage, fraction or address changed."""

    child: Child


@dataclass(frozen=True)
class Died:
    child: Child


Event = Printed | Changed | Died


class Supervisor:
    """Owns all children. A context manager: its exit stops them, last started first."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def spawn(self, name: str, module: str, argv: Sequence[str]) -> Child:
        """Start ``python -m module argv…`` with its status and lifeline fds."""
        child = self._start(name, module, argv)
        self.children.append(child)
        return child

    def replace(self, dead: Child, argv: Sequence[str]) -> Child:
        """Start a child again, in the place of ``dead`` in the order of stopping."""
        _kill_group(dead.process.pid)
        dead.process.wait()
        self._forget(dead)
        child = self._start(dead.name, dead.module, argv)
        self.children[self.children.index(dead)] = child
        return child

    def _start(self, name: str, module: str, argv: Sequence[str]) -> Child:
        status_read, status_write = os.pipe()
        lifeline_read, lifeline_write = os.pipe()
        fds = ["--status-fd", str(status_write), "--lifeline-fd", str(lifeline_read)]
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *argv, *fds],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(status_write, lifeline_read),
                start_new_session=True,
            )
        finally:
            os.close(status_write)
            os.close(lifeline_read)
        child = Child(name, module, process, lifeline_write)
        assert process.stdout is not None
        for fd, kind in ((status_read, "status"), (process.stdout.fileno(), "output")):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, (child, kind, _Lines(fd)))
        return child

    def wait(self, seconds: float) -> list[Event]:
        """Wait for events, at most ``seconds``. Kill a child that has reported a failure and hangs in its exit.

        The event of a failure precedes the lines that other children print about it.
        """
        events: list[Event] = []
        readable = [key.data for key, _ in self._selector.select(seconds)]
        for child, kind, lines in sorted(readable, key=lambda data: data[1] != "status"):
            events += self._read(child, kind, lines)
        for child in self.children:
            if child.state == "failed" and time.monotonic() > child.failed_at + FAILED_EXIT:
                _kill_group(child.process.pid)
            if child.state != "ended" and not child.running:
                events += self._drain(child)
                child.state = "ended"
                events.append(Died(child))
        return events

    def _read(self, child: Child, kind: str, lines: _Lines) -> list[Event]:
        try:
            texts, ended = lines.read()
        except BlockingIOError:
            return []
        if ended:
            self._selector.unregister(lines.fd)
            if kind == "status":
                os.close(lines.fd)
        if kind == "output":
            child.last_lines.extend(texts)
            return [Printed(child, text) for text in texts]
        for text in texts:
            child.update(text)
        return [Changed(child)] if texts else []

    def _drain(self, child: Child) -> list[Event]:
        """Read the rest of an ended child's pipes."""
        events: list[Event] = []
        for key in list(self._selector.get_map().values()):
            if key.data[0] is child:
                events += self._read(*key.data)
        return events

    def drain(self, over: Callable[[], bool], printed: Callable[[Child, str], object]) -> None:
        """Send SIGTERM module by module, last started first, since each module serves those started after it.

        Returns when all children have ended or ``over()`` is true. What they print meanwhile goes to ``printed``.
        """
        for children in self._groups():
            for child in children:
                if child.running:
                    child.process.terminate()
            while any(child.running for child in children) and not over():
                self._pass_on(self.wait(0.02), printed)
            self._pass_on(self.wait(0.0), printed)

    def _pass_on(self, events: Sequence[Event], printed: Callable[[Child, str], object]) -> None:
        for event in events:
            if isinstance(event, Printed):
                printed(event.child, event.text)

    def stop(self) -> None:
        """Stop all children and their process groups within STOP_ALL seconds, last started first. Idempotent."""
        end = time.monotonic() + STOP_ALL
        for children in self._groups():
            for child in children:
                if child.running:
                    # SIGINT stops without delay, but a process without its handler yet would print a traceback.
                    child.process.send_signal(signal.SIGINT if child.state == "ready" else signal.SIGTERM)
            self._wait_for(children, min(time.monotonic() + STOP_EACH, end))
        self._wait_for(self.children, end)
        for child in self.children:
            _kill_group(child.process.pid)
        self._wait_for(self.children, time.monotonic() + STOP_EACH)
        for child in self.children:
            self._forget(child)
        self.children.clear()
        self._selector.close()

    def _groups(self) -> list[list[Child]]:
        """Return the children by module, last started first."""
        groups = itertools.groupby(reversed(self.children), key=lambda child: child.module)
        return [list(group) for _, group in groups]

    def _wait_for(self, children: Sequence[Child], end: float) -> None:
        """Wait until ``end`` (monotonic seconds). Keep reading, since a child with a full pipe cannot exit."""
        while any(child.running for child in children) and (left := end - time.monotonic()) > 0:
            self.wait(min(left, 0.02))

    def _forget(self, child: Child) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data[0] is child:
                self._selector.unregister(key.fd)
                if key.data[1] == "status":
                    os.close(key.fd)
        if child.lifeline >= 0:
            os.close(child.lifeline)
            child.lifeline = -1
        if child.process.stdout is not None:
            child.process.stdout.close()


def _kill_group(pid: int) -> None:
    """Kill the remaining processes of a child's process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
