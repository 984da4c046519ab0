"""httptools' request parser, for which a WebSocket handshake is the only upgrade.

httptools ends a request with ``Upgrade`` at its headers, so the bytes of its body would be the next request. A server
ignores protocols that it does not speak (RFC 9110, 7.8): such a request is parsed again without that header.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Protocol

from httptools import HttpParserUpgrade, HttpRequestParser

Header = tuple[bytes, bytes]  # the name in lower case, and the value


class UpgradingProtocol(Protocol):
    """The callbacks of httptools, and the present request."""

    url: bytes
    headers: list[Header]

    def _should_upgrade(self) -> bool: ...


def may_open_websocket(method: bytes, http_version: str, headers: Iterable[Header]) -> bool:
    """Return whether a request with ``Upgrade: websocket`` is a handshake: RFC 6455 wants GET, HTTP/1.1 and no body."""
    bodies = (b"transfer-encoding", b"content-length")
    has_body = any(name in bodies and (name, value) != (b"content-length", b"0") for name, value in headers)
    return method == b"GET" and http_version == "1.1" and not has_body


def names_host(http_version: str, headers: Iterable[Header]) -> bool:
    """Return whether a request has the one Host field of RFC 9112, 3.2; HTTP/1.0 may have none."""
    num_hosts = sum(name == b"host" for name, _ in headers)
    return num_hosts == 1 or (num_hosts == 0 and http_version == "1.0")


class RequestParser:
    """A request that is parsed again has two sets of callbacks. ``should_upgrade`` is true in the first set only."""

    def __init__(self, protocol: UpgradingProtocol) -> None:
        self._protocol = protocol
        self._parser = self._new_parser()

    def feed_data(self, data: bytes | bytearray | memoryview | array[int]) -> None:
        """Raises HttpParserUpgrade after a WebSocket handshake, and HttpParserError."""
        rest = memoryview(data)
        while rest:
            try:
                self._parser.feed_data(rest)
                return
            except HttpParserUpgrade as exc:
                if self._protocol._should_upgrade():
                    raise
                rest = rest[exc.args[0] :]
            head = self._head_without_upgrade()
            self._parser = self._new_parser()  # httptools' parser ignores what follows a request with "close"
            self._parser.feed_data(head)

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        return self._parser.should_upgrade()

    def _new_parser(self) -> HttpRequestParser:
        parser = HttpRequestParser(self._protocol)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # pipelined requests, as in uvicorn
        return parser

    def _head_without_upgrade(self) -> bytes:
        protocol = self._protocol
        lines = [b"%b %b HTTP/%b" % (self.get_method(), protocol.url, self.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in protocol.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])
