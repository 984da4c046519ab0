"""Replays of KV events at a ROUTER socket, each as fast as its reader reads.

A connection has one replay at a time, and up to a window of it unsent. So a reader that does not read, or asks
repeatedly, costs one window. ZeroMQ tells when the last message of a window has left.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import zmq

from node.kv_events.event_log import Batch, EventLog
from pdserve.logs import LimitedWarnings

_log = logging.getLogger(__name__)
_log.addFilter(LimitedWarnings())  # any program may connect

_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_WINDOW_BYTES = 1 << 20
_UNSENT_BYTES = 64 << 20  # most unsent bytes of all windows together; one batch may exceed it
_MESSAGE_BYTES = 512  # memory of a message, beside its payload
_REQUESTS_AT_ONCE = 100
_MOST_FRAMES = 8  # most frames of a request: proxies add some
_MOST_READERS = 1_000
_FIRST_PAUSE = 1  # milliseconds between looks at windows
_LONGEST_PAUSE = 500  # milliseconds


def encode_number(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big")


@dataclass(slots=True, eq=False)
class _Replay:
    """The replay of a connection."""

    envelope: list[bytes]  # begins each answer
    batches: Iterator[Batch]  # not sent yet
    over: bool = False  # the end marker was sent
    num_unsent: int = 0  # bytes of the latest window
    window: zmq.MessageTracker = field(default_factory=zmq.MessageTracker)  # done once the window has left


class Replays:
    """Answers requests. Single-threaded; no call blocks."""

    def __init__(self, socket: zmq.Socket[bytes], event_log: EventLog) -> None:
        """``socket`` is not bound yet: it takes its bounds with it."""
        socket.setsockopt(zmq.SNDHWM, 0)  # windows bound it
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a reader that has gone is an error
        socket.copy_threshold = 0  # messages of any size can be tracked
        self.socket = socket
        self._event_log = event_log
        self._replays: dict[bytes, _Replay] = {}  # by connection
        self._pause = _FIRST_PAUSE

    def advance(self) -> int | None:
        """Take requests and send what readers have room for.

        Return the milliseconds after which to call again; None: when a request arrives.
        """
        for _ in range(_REQUESTS_AT_ONCE):
            if not self.socket.poll(0):
                break
            self._take(*self.socket.recv_multipart())
        moved = False
        for connection, replay in [*self._replays.items()]:
            if not replay.window.done:
                continue
            replay.num_unsent = 0
            if replay.over:
                del self._replays[connection]
            elif self._num_unsent < _UNSENT_BYTES:
                self._send_window(connection, replay)
            else:
                continue
            moved = True
        self._pause = _FIRST_PAUSE if moved else min(2 * self._pause, _LONGEST_PAUSE)
        return self._pause if self._replays else None

    @property
    def _num_unsent(self) -> int:
        return sum(replay.num_unsent for replay in self._replays.values())

    def _take(self, connection: bytes, *request: bytes) -> None:
        """Begin a replay. A reader that asks again gets the new replay in place of the rest of the old one."""
        frames = [connection, *request]
        *envelope, wanted = frames
        if not request or len(envelope) > _MOST_FRAMES or len(wanted) != _NUMBER_BYTES:
            text = "a request for a replay of KV events is ignored: %d bytes after %d frames, not %d after %d at most"
            _log.warning(text, len(wanted), len(envelope), _NUMBER_BYTES, _MOST_FRAMES)
            return
        if len(self._replays) >= _MOST_READERS and connection not in self._replays:
            _log.warning("a request for a replay of KV events is ignored: %d wait already", _MOST_READERS)
            return
        batches = self._event_log.replay(max(0, int.from_bytes(wanted, "big", signed=True)))
        replay = self._replays.setdefault(connection, _Replay(envelope, batches))
        replay.envelope = envelope
        replay.batches = batches
        replay.over = False

    def _send_window(self, connection: bytes, replay: _Replay) -> None:
        try:
            for number, payload in replay.batches:
                message = [*replay.envelope, encode_number(number), payload]
                replay.num_unsent += sum(map(len, message)) + _MESSAGE_BYTES
                if replay.num_unsent >= _WINDOW_BYTES:
                    replay.window = self._send_last(message)
                    return
                self.socket.send_multipart(message, zmq.NOBLOCK)
            replay.window = self._send_last([*replay.envelope, _END, b""])
            replay.over = True
        except zmq.ZMQError as exc:
            if exc.errno != zmq.EHOSTUNREACH:
                raise
            del self._replays[connection]  # the reader has gone

    def _send_last(self, message: list[bytes]) -> zmq.MessageTracker:
        """Send the last message of a window. The tracker is done once it has left."""
        tracker = self.socket.send_multipart(message, zmq.NOBLOCK, copy=False, track=True)
        assert tracker is not None
        return tracker
