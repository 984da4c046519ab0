"""Network addresses as text: ``host:port``, with brackets around an IPv6 host."""

from __future__ import annotations

import ipaddress
import socket

from pdserve.errors import ConfigError


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return the host without brackets and the port. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise ConfigError(f"{address!r} is not HOST:PORT with a port of 1 … 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that listens on ``host``."""
    host = host.strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def probe_port(host: str, port: int) -> None:
    """Raise OSError unless this machine can listen on ``host:port``."""
    family, kind, proto, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, proto) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1)
