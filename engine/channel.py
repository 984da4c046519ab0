"""The engine's end of the socket to its frontend. It never blocks a step, and waits only while there is no work."""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections.abc import Callable

from pdserve.ipc.frames import Frames, framed
from pdserve.ipc.messages import Crashed, FromEngine, Ping, ToEngine

_READ_BYTES = 1 << 18


class ChannelClosed(Exception):
    """The frontend has ended, so the engine has no purpose."""


class Channel:
    """Frames over a Unix stream socket. Any thread may call ``wake`` and ``send``."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self.num_received = 0  # messages
        self._full = False  # some of ``_outgoing`` is unsent: a writable socket ends a wait, too
        self._frames: Frames[ToEngine] = Frames(ToEngine)
        self._outgoing = bytearray()
        self._sending = threading.Lock()
        self.suspects: Callable[[], tuple[int, ...]] = tuple  # the requests that an exception may come from

    def wake(self) -> None:
        """End a waiting ``receive`` early."""
        os.eventfd_write(self._wake_fd, 1)

    def receive(self, seconds: float | None) -> list[ToEngine]:
        """Return the messages that have arrived. Block until one arrives or ``wake`` is called, at most so long.

        None: without limit.

        A Ping is only counted.
        Raises ChannelClosed when the frontend has ended.
        """
        messages: list[ToEngine] = []
        for key, events in self._selector.select(seconds):
            if key.fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            elif events & selectors.EVENT_READ:
                messages += self._read()
        self.num_received += len(messages)
        messages = [message for message in messages if not isinstance(message, Ping)]
        with self._sending:
            self._flush()
        return messages

    def send(self, message: FromEngine) -> None:
        """Send without blocking. Bytes that the socket does not take now follow with later calls."""
        frame = framed(message)
        with self._sending:
            self._outgoing += frame
            self._flush()

    def drain(self) -> None:
        """Send all unsent bytes, blocking, before the process ends."""
        with self._sending:
            self._socket.setblocking(True)
            self._socket.sendall(self._outgoing)
            self._outgoing.clear()

    def end_with_crash(self, in_step: bool = True) -> None:
        """Send the last message, with the suspects of a step, and all unsent bytes. Raises OSError, ChannelClosed."""
        self.send(Crashed(self.suspects() if in_step else ()))
        self.drain()

    def close(self) -> None:
        """Close the socket; the frontend takes that as the engine's end."""
        self._selector.close()
        self._socket.close()
        os.close(self._wake_fd)

    def _flush(self) -> None:
        while self._outgoing:
            try:
                sent = self._socket.send(self._outgoing)
            except BlockingIOError:
                break
            except (BrokenPipeError, ConnectionResetError) as exc:
                raise ChannelClosed from exc
            del self._outgoing[:sent]
        full = bool(self._outgoing)
        if full is not self._full:  # rarely, to spare the system call on most steps
            self._full = full
            self._selector.modify(self._socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if full else 0))

    def _read(self) -> list[ToEngine]:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionResetError as exc:
            raise ChannelClosed from exc
        if not data:
            raise ChannelClosed
        return self._frames.cut(data)
