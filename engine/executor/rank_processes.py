"""The leader's view of a node's other ranks: processes of this host, and connections to other hosts.

    step loop ──send──► socket of each rank            never blocks: the thread sends what a socket does not take
    thread    ◄──────── outputs, heartbeats, failures, ends of streams

A rank that fails or exits ends the node, on this thread: the step loop may wait for that rank forever. A failure of the
leader's own rank goes the same way, so that the root cause is reported whichever rank it comes from.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple, NoReturn

import msgspec

from engine.executor.rank_messages import FromRank, RankOutput, RankReady, ToRank
from pdserve.config.parallel import RankPosition
from pdserve.host.process import describe_exit, killed_from_outside, log_failure
from pdserve.ipc.frames import Frames, framed
from pdserve.ipc.heartbeat_monitor import HeartbeatMonitor
from pdserve.ipc.messages import Failed, Heartbeat, Shutdown
from pdserve.records import ModelRunnerOutput

_log = logging.getLogger(__name__)

_READ_BYTES = 1 << 18
_FAILURE_WINDOW = 0.3  # seconds: a failure causes others; the root cause is chosen among all of this time
_CLOSE_TIMEOUT = 0.8  # seconds for ranks to exit by themselves


class FailureKind(IntEnum):
    """Kinds of failures, the most likely root cause first. Among failures of one kind, the first is the root cause."""

    SIGNAL = 0
    TYPED_ERROR = 1  # an error of pdserve.errors
    OTHER = 2  # any other exception, such as a collective's that has lost a rank; or an exit without a message


class Failure(NamedTuple):
    """Failure of a rank. ``error`` is a class name of pdserve.errors."""

    kind: FailureKind
    error: str
    message: str
    crashed: bool = True  # False: it was killed from outside, or its host was lost

    @classmethod
    def of(cls, rank: RankPosition, failed: Failed) -> Failure:
        kind = FailureKind.OTHER if failed.kind == "EngineDied" else FailureKind.TYPED_ERROR
        return cls(kind, failed.kind, f"{rank}: {failed.message}")


class RankChannel:
    """Connection to another rank: a ``process`` of this host, or one of another host."""

    def __init__(
        self, rank: RankPosition, sock: socket.socket, timeout: float, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        """``timeout`` is in seconds without heartbeat."""
        sock.setblocking(False)
        self.rank = rank
        self.socket = sock
        self.process = process
        self.monitor = HeartbeatMonitor(timeout, str(rank))
        self.ready: RankReady | None = None
        self.ended = False
        self._frames: Frames[FromRank] = Frames(FromRank)
        self._outgoing = bytearray()
        self._sending = threading.Lock()

    @property
    def has_unsent(self) -> bool:
        return bool(self._outgoing)

    def send(self, frame: bytes = b"") -> None:
        """Send unsent bytes and ``frame``, as far as the socket accepts them. ``read`` notices the end of a rank."""
        with self._sending:
            self._outgoing += frame
            try:
                while self._outgoing:
                    del self._outgoing[: self.socket.send(self._outgoing)]
            except BlockingIOError:
                return
            except OSError:  # it has gone
                self._outgoing.clear()

    def read(self) -> list[FromRank]:
        """Return the messages that have arrived. Raises EOFError once the rank has ended, DecodeError for bad bytes."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as exc:
            raise EOFError from exc
        if not data:
            raise EOFError
        return self._frames.cut(data)

    def exit_failure(self) -> Failure:
        if self.process is None:
            return Failure(FailureKind.OTHER, "EngineDied", f"{self.rank}, on another host, has gone", crashed=False)
        try:
            status = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return Failure(FailureKind.OTHER, "EngineDied", f"{self.rank} has closed its connection")
        kind = FailureKind.SIGNAL if status < 0 else FailureKind.OTHER
        crashed = not killed_from_outside(status)
        return Failure(kind, "EngineDied", f"{self.rank} {describe_exit(status)}", crashed)

    def kill(self) -> None:
        """End the process, where it is of this host, and the connection. Idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(OSError):  # it has ended already
            self.socket.shutdown(socket.SHUT_RDWR)


class LaunchedRank(NamedTuple):
    """A rank process of this host, which waits for an Assign, and the leader's end of its socket."""

    process: subprocess.Popen[bytes]
    socket: socket.socket


def launch_rank() -> LaunchedRank:
    ours, theirs = socket.socketpair()
    with theirs:
        return LaunchedRank(spawn_rank(theirs), ours)


def spawn_rank(sock: socket.socket, digests: range = range(0)) -> subprocess.Popen[bytes]:
    """Start a rank process with its end of a socket to the leader. It digests the weights of the ranks ``digests``."""
    arguments = map(str, (sock.fileno(), digests.start, digests.stop))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "engine.executor.rank_process", *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=(sock.fileno(),),
    )


class RankProcesses:
    """The other ranks of a node, served by a thread."""

    def __init__(
        self, leader: RankPosition, channels: Sequence[RankChannel], on_failure: Callable[[Failure], NoReturn]
    ) -> None:
        """``on_failure`` is called on the thread, after all ranks but the leader have been killed."""
        self.on_output: Callable[[int, ModelRunnerOutput], None] = lambda rank, output: None
        self._leader = leader
        self._channels = channels
        self._on_failure = on_failure
        self._failures: list[Failure] = []
        self._own_failures: queue.SimpleQueue[Failure] = queue.SimpleQueue()  # from the leader, for the thread
        self._ready = threading.Event()
        self._closing = False
        self._announced = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        for channel in channels:
            self._selector.register(channel.socket, selectors.EVENT_READ, channel)
        self._thread = threading.Thread(target=self._run, name="rank processes", daemon=True)
        self._thread.start()

    @property
    def monitors(self) -> tuple[HeartbeatMonitor, ...]:
        return tuple(channel.monitor for channel in self._channels)

    def send(self, message: ToRank, later: ToRank | None = None) -> None:
        """Send a message to all ranks, or ``later`` in its place to those of later stages than the first."""
        frame = framed(message)
        frame_of_later = frame if later is None else framed(later)
        for channel in self._channels:
            channel.send(frame if channel.rank.is_first else frame_of_later)
        if any(channel.has_unsent for channel in self._channels):
            os.eventfd_write(self._wake_fd, 1)

    def wait_ready(self) -> list[RankReady]:
        """Return each rank's message once it has loaded its part; does not return when a rank fails."""
        self._ready.wait()
        return [channel.ready for channel in self._channels if channel.ready is not None]

    @contextlib.contextmanager
    def reporting_own_failure(self) -> Iterator[None]:
        """Log and report an exception of the leader's own rank. It ends the node, as that of another rank does.

        Another rank is reported instead where the exception is likely a consequence of its failure.
        """
        try:
            yield
        except Exception as exc:
            log_failure(_log, exc)
            self._own_failures.put(Failure.of(self._leader, Failed.of(exc)))
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join()  # it ends the process, unless ranks are being closed
            raise

    def announce_shutdown(self) -> None:
        """Tell all ranks to exit; from now on their exits are no failures."""
        self._closing = self._announced = True
        self.send(Shutdown())

    def ignore_failures(self) -> None:
        """Do not report failures from now on: the ranks are being closed."""
        self._closing = True

    def close(self) -> None:
        """End all ranks and the thread; at once, unless shutdown was announced. Idempotent."""
        if self._announced:
            self._thread.join(_CLOSE_TIMEOUT)
        self._closing = True
        for channel in self._channels:
            channel.kill()
        self._thread.join()

    # ------------------------------------------------------------ on the thread

    def _run(self) -> None:
        while not self._all_ended:
            self._poll(None)
            if self._failures:
                self._fail()

    @property
    def _all_ended(self) -> bool:
        return all(channel.ended for channel in self._channels)

    def _poll(self, seconds: float | None) -> None:
        """Wait for events, at most ``seconds``, and handle them.

        The leader's own failure comes last: a rank's message on its failure arrives before the leader can notice it.
        """
        for key, events in self._selector.select(seconds):
            if key.data is None:
                os.eventfd_read(self._wake_fd)
                continue
            if events & selectors.EVENT_WRITE:
                key.data.send()
            if events & selectors.EVENT_READ:
                self._read(key.data)
        for channel in self._channels:
            if not channel.ended:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_unsent else 0)
                self._selector.modify(channel.socket, events, channel)
        while not self._own_failures.empty():
            self._failures.append(self._own_failures.get())

    def _read(self, channel: RankChannel) -> None:
        try:
            for message in channel.read():
                self._receive(channel, message)
        except EOFError:
            self._end(channel, channel.exit_failure)
        except msgspec.DecodeError as exc:
            text = f"{channel.rank} sent what is no message of a rank: {exc}"
            self._end(channel, lambda: Failure(FailureKind.OTHER, "EngineDied", text))

    def _receive(self, channel: RankChannel, message: FromRank) -> None:
        match message:
            case RankOutput(output):
                self.on_output(channel.rank.rank, output)
            case Heartbeat():
                channel.monitor.receive(message)
            case RankReady():
                channel.ready = message
                if all(channel.ready is not None for channel in self._channels):
                    self._ready.set()
            case Failed():
                self._end(channel, lambda: Failure.of(channel.rank, message))

    def _end(self, channel: RankChannel, failure: Callable[[], Failure]) -> None:
        if channel.ended:
            return
        channel.ended = True
        self._selector.unregister(channel.socket)
        if not self._closing:
            self._failures.append(failure())

    def _fail(self) -> None:
        """End the node, with the failure that is the most likely root cause."""
        end = time.monotonic() + _FAILURE_WINDOW
        while not self._all_ended and (left := end - time.monotonic()) > 0:
            self._poll(left)
        for channel in self._channels:
            channel.kill()
        self._on_failure(min(self._failures, key=lambda failure: failure.kind))
