"""The network between hosts: passes IPv4 packets on, or loses or delays them, and notes who opens connections to whom.

    python switch.py       in a network namespace of its own, where each host's cable ends

It is told what to do by lines of JSON on stdin (``Orders``), and answers each with one of what it has seen (``Seen``).

Frames come and go with their virtio header (PACKET_VNET_HDR, packet(7)): what hosts leave to their network card, which
are checksums and cutting large packets, stays to be done, and nobody has to do it.
"""

from __future__ import annotations

import heapq
import itertools
import select
import socket
import sys
import time

import msgspec

VNET_HEADER, ETHERNET_HEADER = 10, 14  # bytes
IP = VNET_HEADER + ETHERNET_HEADER  # where that header begins
TCP, SYN, ACK = 6, 0x02, 0x10
LOST = -1.0  # in place of a delay
_SOL_PACKET, _PACKET_VNET_HDR, _SO_RCVBUFFORCE = 263, 15, 33  # linux/if_packet.h, asm-generic/socket.h
_ETH_P_IP = 0x0800
_BUFFER_BYTES = 32 << 20
_AT_ONCE = 64  # packets between two looks at what is due


class Host(msgspec.Struct, frozen=True):
    name: str
    address: str
    device: str  # of the switch
    mac: str


class Orders(msgspec.Struct):
    """All of what holds from now on."""

    hosts: list[Host] = []
    links: dict[str, float] = {}  # "from to" → seconds on the way, or LOST; others take no time
    allowed: list[tuple[str, str, int, int]] | None = None  # (from, to, first, last port); None: all


class Seen(msgspec.Struct):
    """Since the beginning."""

    opened: list[tuple[str, str, int, bool]] = []  # connections, once each: (from, to, port, whether it was allowed)
    num_bytes: dict[str, int] = {}  # by "from to": passed on


class Switch:
    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_IP))
        self._socket.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        self._socket.setblocking(False)
        self._orders = Orders()
        self._hosts: dict[bytes, Host] = {}  # by address
        self._opened: set[tuple[str, str, int, bool]] = set()
        self._num_bytes: dict[str, int] = {}
        self._late: list[tuple[float, int, Host, bytes]] = []  # heap of (when, number, to whom, frame)
        self._numbers = itertools.count()

    def run(self) -> None:
        """Until stdin ends."""
        while True:
            wait = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            ready, _, _ = select.select([self._socket, sys.stdin], (), (), wait)
            if sys.stdin in ready:
                line = sys.stdin.readline()
                if not line:
                    return
                self._obey(msgspec.json.decode(line, type=Orders))
            if self._socket in ready:
                self._receive()
            while self._late and self._late[0][0] <= time.monotonic():
                self._send(*heapq.heappop(self._late)[2:])

    def _obey(self, orders: Orders) -> None:
        self._orders = orders
        self._hosts = {socket.inet_aton(host.address): host for host in orders.hosts}
        seen = Seen(sorted(self._opened), self._num_bytes)
        sys.stdout.write(msgspec.json.encode(seen).decode() + "\n")
        sys.stdout.flush()

    def _receive(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                frame = self._socket.recv(1 << 17)
            except BlockingIOError:
                return
            source = self._hosts.get(frame[IP + 12 : IP + 16])
            target = self._hosts.get(frame[IP + 16 : IP + 20])
            if source is not None and target is not None:
                self._pass_on(source, target, frame)

    def _pass_on(self, source: Host, target: Host, frame: bytes) -> None:
        link = f"{source.name} {target.name}"
        delay = self._orders.links.get(link, 0.0)
        if not self._may_open(source, target, frame) or delay == LOST:
            return
        self._num_bytes[link] = self._num_bytes.get(link, 0) + len(frame) - IP
        if delay:
            heapq.heappush(self._late, (time.monotonic() + delay, next(self._numbers), target, frame))
        else:
            self._send(target, frame)

    def _may_open(self, source: Host, target: Host, frame: bytes) -> bool:
        """Whether this packet is allowed. Only the first one of a connection is ever refused, as policies mean it."""
        tcp = IP + 4 * (frame[IP] & 0x0F)
        if frame[IP + 9] != TCP or frame[tcp + 13] & (SYN | ACK) != SYN:
            return True
        port = int.from_bytes(frame[tcp + 2 : tcp + 4])
        rules = self._orders.allowed
        allowed = rules is None or any(
            (source.name, target.name) == (rule[0], rule[1]) and rule[2] <= port <= rule[3] for rule in rules
        )
        self._opened.add((source.name, target.name, port, allowed))
        return allowed

    def _send(self, target: Host, frame: bytes) -> None:
        header = bytes.fromhex(target.mac.replace(":", ""))
        try:
            self._socket.sendto(frame[:VNET_HEADER] + header + frame[VNET_HEADER + 6 :], (target.device, 0))
        except OSError:  # its cable is out, or its queue is full: the packet is lost
            return


if __name__ == "__main__":
    Switch().run()
