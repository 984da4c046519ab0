"""TCP sockets that UCX has opened to a peer: shut down when the peer hangs, and asked whether bytes still arrive.

UCX does not tell its sockets. A socket of this process is one of them if both hold:

    it appeared after the agent began to connect, and
    it leads to an address and a port that the peer's NIXL metadata names as an interface of UCX's TCP transport

A process has other connections to the same addresses: of torch.distributed, gRPC, or other agents.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress

from connector.backends.nixl.socket_drain import SocketDrain

_drain = SocketDrain()
_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received in struct tcp_info, an uint64 (linux/tcp.h)

# An interface in the metadata, as UCX packs it (uct_tcp_device_addr_t, ucp_address_packed_iface_attr_t):
#     0 or 1 for loopback | address family | address, or the identity of the host | attributes | length 2, flags | port
_ATTRIBUTES_AND_LENGTH = rb"(?:.{18}|.{10})[\x02\x42\x82\xc2]"  # UCX_ADDRESS_VERSION v1 or v2
_HOST_IDENTITY_BYTES = 12  # identifies a machine and its network namespace: 127.0.0.1 of another host is not ours


class PeerSockets:
    """Create it before the agent with the metadata ``own`` connects to the peer with the metadata ``peer``."""

    def __init__(self, own: bytes, peer: bytes) -> None:
        self._own = own
        self._peer = peer
        self._earlier = frozenset(_sockets())

    def shut(self) -> int:
        """Shut the sockets down; return how many.

        No other way ends a transfer with a hung peer: UCX sees the end of the stream, declares the endpoint dead and
        fails its transfers, and no byte can arrive any more. After removing the agent or releasing the handle, bytes
        would still land once the peer continues. Other transports do not need this: their reads do not involve the
        peer's CPU. Towards the peer the connection stays open for a while (socket_drain.py).
        """
        return sum(_drain.add(connection) for connection in self._open())

    def received_bytes(self) -> int:
        """Return the bytes received over the open sockets."""
        total = 0
        for connection in self._open():
            with connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
                total += int.from_bytes(info[_BYTES_RECEIVED:], "little")
        return total

    def _open(self) -> Iterator[socket.socket]:
        """Yield duplicates of the sockets, which the caller closes: UCX may close its own."""
        for inode, descriptor in _sockets().items():
            if inode in self._earlier:
                continue
            try:
                connection = socket.socket(fileno=os.dup(descriptor))
            except OSError:  # closed meanwhile
                continue
            if self._leads_to_peer(connection):
                yield connection
            else:
                connection.close()

    def _leads_to_peer(self, connection: socket.socket) -> bool:
        if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        try:
            host, port = connection.getpeername()[:2]
        except OSError:  # listening, or gone already
            return False
        address = ipaddress.ip_address(host.partition("%")[0])
        family = bytes([connection.family])
        if address.is_loopback:
            interface = rb"\x01" + re.escape(family) + b".{%d}" % _HOST_IDENTITY_BYTES
        else:
            interface = re.escape(b"\x00" + family + address.packed)
        pattern = b"(" + interface + b")" + _ATTRIBUTES_AND_LENGTH + re.escape(port.to_bytes(2, "big"))
        match = re.search(pattern, self._peer, re.DOTALL)
        return match is not None and (not address.is_loopback or match[1] in self._own)


def _sockets() -> dict[int, int]:
    """Return a descriptor of each socket of this process, by inode. Inodes of sockets are not reused."""
    descriptors = {}
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            state = os.fstat(int(entry))
            if stat.S_ISSOCK(state.st_mode):
                descriptors[state.st_ino] = int(entry)
    return descriptors
