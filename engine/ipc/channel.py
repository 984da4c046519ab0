"""The engine's end of the socket to its front: it never blocks a step, and waits only when there is nothing to do."""

from __future__ import annotations

import os
import selectors
import socket
import threading

import msgspec

from engine.ipc.frames import Frames, framed
from engine.ipc.messages import FromEngine, ToEngine

_READ_BYTES = 1 << 18


class ChannelClosed(Exception):
    """The front has ended, so the engine has nobody to work for."""


class Channel:
    """Frames over a Unix stream socket (see engine/ipc/messages.py). Used by one thread; ``wake`` may come from any.

    So may last words: ``send`` and ``drain`` lock each other out.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._full = False  # some of ``_outgoing`` is left, and that the socket takes more ends a wait, too
        self._frames: Frames[ToEngine] = Frames(msgspec.msgpack.Decoder(ToEngine))
        self._outgoing = bytearray()
        self._sending = threading.Lock()

    def wake(self) -> None:
        """End a waiting ``receive`` early."""
        os.eventfd_write(self._wake_fd, 1)

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """All messages that have arrived; with ``wait``, block until there is one or until woken.

        Raises ChannelClosed once the front has gone.
        """
        messages: list[ToEngine] = []
        for key, events in self._selector.select(None if wait else 0):
            if key.fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            elif events & selectors.EVENT_READ:
                messages += self._read()
        with self._sending:
            self._flush()
        return messages

    def send(self, message: FromEngine) -> None:
        """Send without blocking; what the socket does not take now follows with later calls."""
        frame = framed(message)
        with self._sending:
            self._outgoing += frame
            self._flush()

    def drain(self) -> None:
        """Send all that is left, blocking: the last words before the process ends."""
        with self._sending:
            self._socket.setblocking(True)
            self._socket.sendall(self._outgoing)
            self._outgoing.clear()

    def close(self) -> None:
        """Close the socket; the front takes it as this engine's end."""
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
        if full is not self._full:  # seldom, so that the system call is not made for every step
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
