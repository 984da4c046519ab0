"""Connections that were cut because the peer hangs: what it still sends when it wakes up is read, and thrown away.

UCX ends a process that has reads to answer on a connection that is gone ("Fatal: unexpected error"): a peer that hung
for a moment would not survive that we gave up on it. Therefore only our reading end is shut:

    our UCX ──╳ end of stream: endpoint dead, nothing can land any more
              └── a duplicate of the socket: the peer's answers end here ◄── the peer, when it wakes up
"""

from __future__ import annotations

import socket
import threading
import time

_KEEP_SECONDS = 300.0  # for a peer to wake up
_QUIET_SECONDS = 1.0  # after something came, until that was all
_NAP = 0.02  # seconds
_BUFFER_BYTES = 1 << 18
_ESTABLISHED = 1  # tcpi_state of tcp(7)


class _Remnant:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until = time.monotonic() + _KEEP_SECONDS

    def drain(self, buffer: bytearray) -> bool:
        """Throw away what has come; False when nothing more is to be expected, and the socket is closed."""
        try:
            while self._connection.recv_into(buffer, 0, socket.MSG_DONTWAIT):
                self._until = time.monotonic() + _QUIET_SECONDS
        except BlockingIOError:
            pass
        except OSError:  # the peer has ended
            self._until = 0.0
        if time.monotonic() < self._until and self._is_open():
            return True
        self._connection.close()
        return False

    def _is_open(self) -> bool:
        return self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED


class SocketDrain:
    """One for the process. Its thread lives while there is something to wait for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._remnants: list[_Remnant] = []

    def take(self, connection: socket.socket) -> bool:
        """Shut the reading end of a connection down, and keep the socket. False when it was broken already."""
        try:
            connection.shutdown(socket.SHUT_RD)
        except OSError:
            connection.close()
            return False
        with self._lock:
            self._remnants.append(_Remnant(connection))
            if len(self._remnants) == 1:
                threading.Thread(target=self._run, name="kv-drain", daemon=True).start()
        return True

    def _run(self) -> None:
        buffer = bytearray(_BUFFER_BYTES)
        while True:
            time.sleep(_NAP)
            with self._lock:
                self._remnants = [remnant for remnant in self._remnants if remnant.drain(buffer)]
                if not self._remnants:
                    return
