"""The other ranks of a node, as its leader knows them: processes of this host, and connections to other hosts.

    step loop ──send──► socket of each rank            it never waits: what a socket does not take, the thread sends
    crew's thread ◄──── outputs, beats, failures, ends

A rank that fails or ends takes the node along, on this thread: the step loop may be waiting for that rank for ever.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple, NoReturn

import msgspec

from engine.executor.rank_messages import Failed, FromRank, RankOutput, RankReady, ToRank
from engine.ipc.frames import Frames, framed
from engine.ipc.messages import Heartbeat, Shutdown
from engine.liveness.heartbeat_monitor import HeartbeatMonitor
from pdserve.config.parallel import RankPosition
from pdserve.records import ModelRunnerOutput

_READ_BYTES = 1 << 18
_GRACE = 0.3  # seconds: one failure brings others about; who began is told from those of this time
_CLOSE_SECONDS = 0.8  # that ranks have to end by themselves


class Doubt(IntEnum):
    """How likely a failure is but the consequence of another rank's; the least is told, and of these the first."""

    KILLED = 0  # by a signal
    FORESEEN = 1  # an error of pdserve.errors
    UNFORESEEN = 2  # without a word, or for example of a collective that has lost somebody


class Failure(NamedTuple):
    """Of a rank."""

    doubt: Doubt
    kind: str  # of an error in pdserve.errors
    text: str


class RankChannel:
    """One other rank: a ``process`` of this host, or one of another. ``patience`` is in seconds of silence."""

    def __init__(
        self, place: RankPosition, sock: socket.socket, patience: float, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        sock.setblocking(False)
        self.place = place
        self.socket = sock
        self.process = process
        self.monitor = HeartbeatMonitor(patience, str(place))
        self.ready: RankReady | None = None
        self.ended = False
        self._frames: Frames[FromRank] = Frames(msgspec.msgpack.Decoder(FromRank))
        self._outgoing = bytearray()
        self._sending = threading.Lock()

    @property
    def full(self) -> bool:
        """Whether something waits for the socket to take more."""
        return bool(self._outgoing)

    def send(self, message: ToRank) -> None:
        """Without waiting. Whoever has gone is noticed by ``read``."""
        self.send_frame(framed(message))

    def send_frame(self, frame: bytes) -> None:
        """As ``send``, for a message that goes to several."""
        with self._sending:
            self._outgoing += frame
            self._flush()

    def flush(self) -> None:
        """Send what the socket takes by now."""
        with self._sending:
            self._flush()

    def read(self) -> list[FromRank]:
        """The messages that have arrived. Raises EOFError once the rank has gone, DecodeError for nonsense."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as exc:
            raise EOFError from exc
        if not data:
            raise EOFError
        return self._frames.cut(data)

    def obituary(self) -> Failure:
        """How a rank ended whose socket has."""
        if self.process is None:
            return Failure(Doubt.UNFORESEEN, "EngineDied", f"{self.place}, on another host, has gone")
        try:
            status = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return Failure(Doubt.UNFORESEEN, "EngineDied", f"{self.place} has closed its connection")
        if status < 0:
            return Failure(Doubt.KILLED, "EngineDied", f"{self.place} was killed by {signal.Signals(-status).name}")
        return Failure(Doubt.UNFORESEEN, "EngineDied", f"{self.place} ended with status {status}")

    def kill(self) -> None:
        """End the process, where it is of this host, and the connection. Idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(OSError):  # it has ended already
            self.socket.shutdown(socket.SHUT_RDWR)

    def _flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError:  # it has gone
            self._outgoing.clear()


def start_rank(place: RankPosition, patience: float) -> RankChannel:
    """A rank on this host, with a socket to it."""
    ours, theirs = socket.socketpair()
    with theirs:
        return RankChannel(place, ours, patience, spawn_rank(theirs))


def spawn_rank(sock: socket.socket) -> subprocess.Popen[bytes]:
    """A rank process with its end of a socket to the leader."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "engine.executor.rank_process", str(sock.fileno())],
        stdin=subprocess.DEVNULL,
        pass_fds=(sock.fileno(),),
    )


class RankProcesses:
    """``on_failure`` is called with an error's kind and text, on the crew's thread, when no rank lives any more."""

    def __init__(self, links: Sequence[RankChannel], on_failure: Callable[[str, str], NoReturn]) -> None:
        self.on_output: Callable[[int, ModelRunnerOutput], None] = lambda rank, output: None
        self._links = links
        self._on_failure = on_failure
        self._failures: list[Failure] = []
        self._failing = threading.Event()
        self._ready = threading.Event()
        self._dismissed = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        for link in links:
            self._selector.register(link.socket, selectors.EVENT_READ, link)
        self._thread = threading.Thread(target=self._run, name="crew", daemon=True)
        self._thread.start()

    @property
    def monitors(self) -> tuple[HeartbeatMonitor, ...]:
        return tuple(link.monitor for link in self._links)

    def send(self, message: ToRank) -> None:
        """To all ranks, without waiting."""
        frame = framed(message)
        for link in self._links:
            link.send_frame(frame)
        if any(link.full for link in self._links):
            os.eventfd_write(self._wake_fd, 1)

    def wait_ready(self) -> list[RankReady]:
        """What each rank says once it has loaded its part; where one fails, nobody comes back from here."""
        self._ready.wait()
        return [link.ready for link in self._links if link.ready is not None]

    @contextlib.contextmanager
    def blamed_first(self) -> Iterator[None]:
        """An error in here that comes from another rank's end is told as that: the process ends before it is raised."""
        try:
            yield
        except Exception:
            if self._failing.wait(_GRACE * 2):
                self._thread.join()
            raise

    def announce_shutdown(self) -> None:
        """Tell all ranks to end; from now on their ends are no failures."""
        self._dismissed = True
        self.send(Shutdown())

    def close(self) -> None:
        """End all ranks, at once unless they were dismissed, and with them the thread. Idempotent."""
        if self._dismissed:
            self._thread.join(_CLOSE_SECONDS)
        self._dismissed = True
        for link in self._links:
            link.kill()
        self._thread.join()

    # ------------------------------------------------------------ on the crew's thread

    def _run(self) -> None:
        while not self._all_ended:
            self._turn(None)
            if self._failures:
                self._fail()

    @property
    def _all_ended(self) -> bool:
        return all(link.ended for link in self._links)

    def _turn(self, seconds: float | None) -> None:
        """Wait for something to happen, at most so long, and see to it."""
        for key, events in self._selector.select(seconds):
            if key.data is None:
                os.eventfd_read(self._wake_fd)
                continue
            if events & selectors.EVENT_WRITE:
                key.data.flush()
            if events & selectors.EVENT_READ:
                self._hear(key.data)
        for link in self._links:
            if not link.ended:
                self._selector.modify(
                    link.socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if link.full else 0), link
                )

    def _hear(self, link: RankChannel) -> None:
        try:
            for message in link.read():
                self._take(link, message)
        except EOFError:
            self._end(link, link.obituary)
        except msgspec.DecodeError as exc:
            text = f"{link.place} sent what is no message of a rank: {exc}"
            self._end(link, lambda: Failure(Doubt.UNFORESEEN, "EngineDied", text))

    def _take(self, link: RankChannel, message: FromRank) -> None:
        match message:
            case RankOutput(output):
                self.on_output(link.place.rank, output)
            case Heartbeat():
                link.monitor.receive(message)
            case RankReady():
                link.ready = message
                if all(each.ready is not None for each in self._links):
                    self._ready.set()
            case Failed(kind, text):
                doubt = Doubt.UNFORESEEN if kind == "EngineDied" else Doubt.FORESEEN
                self._end(link, lambda: Failure(doubt, kind, f"{link.place}: {text}"))

    def _end(self, link: RankChannel, how: Callable[[], Failure]) -> None:
        if link.ended:
            return
        link.ended = True
        self._selector.unregister(link.socket)
        if not self._dismissed:
            self._failing.set()
            self._failures.append(how())

    def _fail(self) -> None:
        """Take the node down, with the failure that most likely came first."""
        end = time.monotonic() + _GRACE
        while not self._all_ended and (left := end - time.monotonic()) > 0:
            self._turn(left)
        for link in self._links:
            link.kill()
        cause = min(self._failures, key=lambda failure: failure.doubt)
        self._on_failure(cause.kind, cause.text)
