"""Read and discard what a hung peer still sends on a connection that was shut.

UCX ends a process that answers reads on a connection that is gone ("Fatal: unexpected error"): a peer that hung for a
moment would not survive. Therefore only our reading end is shut:

    our UCX ──╳ end of stream: endpoint dead, nothing can land any more
              └── a duplicate of the socket reads the answers ◄── the peer, when it continues
"""

from __future__ import annotations

import socket
import threading
import time

_KEEP_SECONDS = 300.0  # time for a peer to continue
_QUIET_SECONDS = 1.0  # silence after data, until all has been sent
_POLL_SECONDS = 0.02
_BUFFER_BYTES = 1 << 18
_ESTABLISHED = 1  # tcpi_state of tcp(7)


class _DrainedSocket:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until = time.monotonic() + _KEEP_SECONDS

    def drain(self, buffer: bytearray) -> bool:
        """Discard received data. Return False once no more is expected; the socket is then closed."""
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
    """One per process. Its thread lives while there are sockets to drain."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: list[_DrainedSocket] = []

    def add(self, connection: socket.socket) -> bool:
        """Shut the reading end of a connection and drain the socket. Return False if it was already broken."""
        try:
            connection.shutdown(socket.SHUT_RD)
        except OSError:
            connection.close()
            return False
        with self._lock:
            self._sockets.append(_DrainedSocket(connection))
            if len(self._sockets) == 1:
                threading.Thread(target=self._run, name="kv-socket-drain", daemon=True).start()
        return True

    def _run(self) -> None:
        buffer = bytearray(_BUFFER_BYTES)
        while True:
            time.sleep(_POLL_SECONDS)
            with self._lock:
                self._sockets = [drained for drained in self._sockets if drained.drain(buffer)]
                if not self._sockets:
                    return
