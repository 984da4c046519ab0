"""Fetches an image by its URL, from the public internet alone. Only this file imports httpcore.

    URL ─► scheme, port, no credentials ─► name resolved once ─► every address public ─► connection to one of them
     ▲                                                                                        │
     └─────────────── redirect: all of it again, three times at most ◄────────────────────────┤
                                                                                   200 ─► body, up to 20 MiB

The name is not resolved again for the connection, so a name server that changes its answer gains nothing. TLS checks
the certificate of the name. httpcore reads no environment variables: no proxy stands between.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any

import httpcore
import httpx
import msgspec

from pdserve.errors import RequestError
from router.images.addresses import is_public
from router.images.source import MAX_FILE_BYTES

FETCH_SECONDS = 10.0  # for an image, with its redirects
MAX_REDIRECTS = 3

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = (
    (b"User-Agent", b"pdserve"),
    (b"Accept", b"image/png, image/jpeg, image/webp, image/gif"),
    (b"Accept-Encoding", b"identity"),
)
_MAX_WIRE = MAX_FILE_BYTES + (4 << 20)  # bytes of a response with its headers and the lines of its chunks
SEND_IT = "send the image itself as 'data:image/png;base64,…'"
_TOO_SLOW = f"its URL takes more than {FETCH_SECONDS:.0f} s; {SEND_IT}"
_TOO_LARGE = f"its URL has more than {MAX_FILE_BYTES} bytes, the limit; send a smaller file"
_NOT_PUBLIC = (
    f"the host of its URL is unknown, or not on the public internet; {SEND_IT}"  # tells no names of the inside
)

Resolve = Callable[[str, int], Sequence[str]]


class FetchRule(msgspec.Struct, frozen=True):
    """Limits of a fetch. Tests allow addresses of their own machine; no option does."""

    allowed: tuple[str, ...] = ()  # networks beside the public internet
    ports: tuple[int, ...] = ()  # ports beside that of the scheme
    seconds: float = FETCH_SECONDS


def resolve_host(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a name, IPv4 first. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET)]


class Fetcher:
    """Fetches one image after the other, each with connections of its own."""

    def __init__(self, rule: FetchRule = FetchRule(), resolve: Resolve = resolve_host) -> None:  # noqa: B008 - frozen
        self._rule = rule
        self._resolve = resolve
        self._tls = httpcore.default_ssl_context()

    def fetch(self, url: str) -> bytearray:
        """Return the file at a URL. Raises RequestError with what is wrong with the URL."""
        until = monotonic() + self._rule.seconds
        network = _PublicNetwork(self._rule, self._resolve, until)
        target = _parsed(url)
        for _ in range(MAX_REDIRECTS + 1):
            self._check(target)
            try:
                with httpcore.ConnectionPool(self._tls, network_backend=network) as pool:
                    answer = _get(pool, target, until)
            except (httpcore.TimeoutException, TimeoutError) as exc:
                raise RequestError(_TOO_SLOW) from exc
            except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as exc:
                raise RequestError(_network_fault(exc)) from exc
            if isinstance(answer, bytearray):
                return answer
            secure = target.scheme == "https"
            target = _parsed(answer, target)
            if secure and target.scheme == "http":
                raise RequestError(f"its URL redirects from https to http; {SEND_IT}")
        raise RequestError(f"its URL redirects more than {MAX_REDIRECTS} times; {SEND_IT}")

    def _check(self, url: httpx.URL) -> None:
        """Raise RequestError for a URL that is not fetched, whatever its host."""
        if url.scheme not in _PORTS or not url.host:
            raise RequestError(f"its URL is none of http or https; {SEND_IT}")
        if url.userinfo:
            raise RequestError(f"its URL has a user name or password; leave them out, or {SEND_IT}")
        if url.port is not None and url.port != _PORTS[url.scheme] and url.port not in self._rule.ports:
            raise RequestError(f"its URL has port {url.port}; images come from ports 80 and 443 only, {SEND_IT}")


def _parsed(url: str, base: httpx.URL | None = None) -> httpx.URL:
    try:
        return httpx.URL(url) if base is None else base.join(url)
    except (httpx.InvalidURL, ValueError, TypeError) as exc:
        raise RequestError(f"its URL is not valid; {SEND_IT}") from exc


def _get(pool: httpcore.ConnectionPool, url: httpx.URL, until: float) -> bytearray | str:
    """Return the body, or the URL that a redirect names."""
    target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
    with pool.stream("GET", target, headers=[(b"Host", url.netloc), *_HEADERS]) as response:
        headers = {name.lower(): value for name, value in response.headers}
        if response.status in _REDIRECTS and b"location" in headers:
            return headers[b"location"].decode("latin-1")
        if response.status != 200:
            raise RequestError(f"the server of its URL answers with status {response.status}; {SEND_IT}")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > MAX_FILE_BYTES:
            raise RequestError(_TOO_LARGE)
        return _body(response.iter_stream(), until)


def _body(pieces: Iterable[bytes], until: float) -> bytearray:
    body = bytearray()
    for piece in pieces:
        body += piece
        if len(body) > MAX_FILE_BYTES:
            raise RequestError(_TOO_LARGE)
        if monotonic() > until:
            raise TimeoutError
    return body


def _network_fault(error: Exception) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"the server of its URL has no valid certificate; {SEND_IT}"
        cause = cause.__cause__ or cause.__context__
    return f"the server of its URL cannot be reached, or breaks off; {SEND_IT}"


class _PublicNetwork(httpcore.NetworkBackend):
    """Connects to public addresses only, and until a time of ``monotonic``."""

    def __init__(self, rule: FetchRule, resolve: Resolve, until: float) -> None:
        self._rule = rule
        self._resolve = resolve
        self._until = until
        self._system = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to the first address of a name that answers. Raises RequestError unless all of them are public."""
        try:
            addresses = self._resolve(host, port)
        except (OSError, UnicodeError) as exc:
            raise RequestError(_NOT_PUBLIC) from exc
        if not addresses or not all(is_public(address, self._rule.allowed) for address in addresses):
            raise RequestError(_NOT_PUBLIC)
        failure: Exception = OSError()
        for address in addresses:
            try:
                return _Bounded(self._system.connect_tcp(address, port, _left(self._until)), self._until)
            except httpcore.ConnectError as exc:
                failure = exc
        raise failure


class _Bounded(httpcore.NetworkStream):
    """A connection with limits of time and of the bytes that it receives."""

    def __init__(self, stream: httpcore.NetworkStream, until: float, received: int = 0) -> None:
        self._stream = stream
        self._until = until
        self._received = received

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = self._stream.read(max_bytes, _left(self._until))
        self._received += len(data)
        if self._received > _MAX_WIRE:
            raise RequestError(_TOO_LARGE)
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left(self._until))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Bounded(self._stream.start_tls(ssl_context, server_hostname, _left(self._until)), self._until)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left(until: float) -> float:
    """Return the seconds that are left. Raises TimeoutError."""
    left = until - monotonic()
    if left <= 0:
        raise TimeoutError
    return left
