"""The switch between hosts: forwards, drops or delays IPv4 packets, and records which connections are opened.

    python switch.py       in its own network namespace, which has one end of each host's veth pair

Each line on stdin is a ``SwitchConfig`` in JSON; the answer on stdout is a ``SwitchReport``.

Frames keep their virtio header (PACKET_VNET_HDR, packet(7)). So checksums and segmentation, which hosts offload to
their network card, stay offloaded and are never computed.
"""

from __future__ import annotations

import heapq
import itertools
import select
import socket
import sys
import time

import msgspec

VNET_HEADER = 10  # bytes
ETHERNET_HEADER = 14  # bytes
IP = VNET_HEADER + ETHERNET_HEADER  # offset of the IP header
TCP = 6
SYN = 0x02
ACK = 0x10
DROPPED = -1.0  # used as a delay: drop the packet
_SOL_PACKET = 263  # linux/if_packet.h
_PACKET_VNET_HDR = 15  # linux/if_packet.h
_SO_RCVBUFFORCE = 33  # asm-generic/socket.h
_ETH_P_IP = 0x0800
_BUFFER_BYTES = 32 << 20
_BATCH = 64  # packets received before due packets are sent


class Host(msgspec.Struct, frozen=True):
    name: str
    address: str
    device: str  # on the switch's side of the veth pair
    mac: str


class SwitchConfig(msgspec.Struct):
    """The complete configuration; it replaces the previous one."""

    hosts: list[Host] = []
    links: dict[str, float] = {}  # "from to" → delay in seconds, or DROPPED; other links have no delay
    allowed: list[tuple[str, str, int, int]] | None = None  # (from, to, first, last port); None: all


class SwitchReport(msgspec.Struct):
    """Connections and traffic since the start of the switch."""

    opened: list[tuple[str, str, int, bool]] = []  # distinct connections: (from, to, port, allowed)
    num_bytes: dict[str, int] = {}  # forwarded bytes by "from to"


class Switch:
    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_IP))
        self._socket.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        self._socket.setblocking(False)
        self._config = SwitchConfig()
        self._hosts: dict[bytes, Host] = {}  # by address
        self._opened: set[tuple[str, str, int, bool]] = set()
        self._num_bytes: dict[str, int] = {}
        self._delayed: list[tuple[float, int, Host, bytes]] = []  # heap of (due time, number, target, frame)
        self._numbers = itertools.count()

    def run(self) -> None:
        """Run until stdin ends."""
        while True:
            wait = max(0.0, self._delayed[0][0] - time.monotonic()) if self._delayed else None
            ready, _, _ = select.select([self._socket, sys.stdin], (), (), wait)
            if sys.stdin in ready:
                line = sys.stdin.readline()
                if not line:
                    return
                self._configure(msgspec.json.decode(line, type=SwitchConfig))
            if self._socket in ready:
                self._receive()
            while self._delayed and self._delayed[0][0] <= time.monotonic():
                self._send(*heapq.heappop(self._delayed)[2:])

    def _configure(self, config: SwitchConfig) -> None:
        self._config = config
        self._hosts = {socket.inet_aton(host.address): host for host in config.hosts}
        seen = SwitchReport(sorted(self._opened), self._num_bytes)
        sys.stdout.write(msgspec.json.encode(seen).decode() + "\n")
        sys.stdout.flush()

    def _receive(self) -> None:
        for _ in range(_BATCH):
            try:
                frame = self._socket.recv(1 << 17)
            except BlockingIOError:
                return
            source = self._hosts.get(frame[IP + 12 : IP + 16])
            target = self._hosts.get(frame[IP + 16 : IP + 20])
            if source is not None and target is not None:
                self._forward(source, target, frame)

    def _forward(self, source: Host, target: Host, frame: bytes) -> None:
        link = f"{source.name} {target.name}"
        delay = self._config.links.get(link, 0.0)
        if not self._is_allowed(source, target, frame) or delay == DROPPED:
            return
        self._num_bytes[link] = self._num_bytes.get(link, 0) + len(frame) - IP
        if delay:
            heapq.heappush(self._delayed, (time.monotonic() + delay, next(self._numbers), target, frame))
        else:
            self._send(target, frame)

    def _is_allowed(self, source: Host, target: Host, frame: bytes) -> bool:
        """Return whether a packet is allowed. As with network policies, only the first SYN can be refused."""
        tcp = IP + 4 * (frame[IP] & 0x0F)
        if frame[IP + 9] != TCP or frame[tcp + 13] & (SYN | ACK) != SYN:
            return True
        port = int.from_bytes(frame[tcp + 2 : tcp + 4])
        rules = self._config.allowed
        allowed = rules is None or any(
            (source.name, target.name) == (rule[0], rule[1]) and rule[2] <= port <= rule[3] for rule in rules
        )
        self._opened.add((source.name, target.name, port, allowed))
        return allowed

    def _send(self, target: Host, frame: bytes) -> None:
        header = bytes.fromhex(target.mac.replace(":", ""))
        try:
            self._socket.sendto(frame[:VNET_HEADER] + header + frame[VNET_HEADER + 6 :], (target.device, 0))
        except OSError:  # the link is down or the queue is full: the packet is lost
            return


if __name__ == "__main__":
    Switch().run()
