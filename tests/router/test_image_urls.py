"""Images by URL come from the public internet alone, within limits of time and size, whatever servers and names do."""

from __future__ import annotations

import asyncio
import base64
import io
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme
from image_checkpoints import random_image

from pdserve.errors import Overloaded, RequestError
from pdserve.images import ImageInput
from router.images import fetchers, fetching
from router.images.addresses import is_public
from router.images.fetchers import MAX_URLS, MOST_FETCHERS, URLS_AT_ONCE, Fetchers
from router.images.fetching import MAX_REDIRECTS, Fetcher, FetchRule, Resolve
from router.images.loading import ImageLoader
from router.images.source import MAX_FILE_BYTES, ImageSource
from router.metrics import RouterMetrics

ACCEPTED = ImageInput(
    token_id=9, patch_size=16, merge_size=2, min_pixels=4096, max_pixels=1 << 18, fingerprint=bytes(range(32))
)
PUBLIC = "93.184.216.34"
NAME = "messages[0].content[1]"
NOT_PUBLIC = "unknown, or not on the public internet"


def picture() -> bytes:
    file = io.BytesIO()
    random_image(64, 96, 1).save(file, "PNG")
    return file.getvalue()


PNG = picture()


# ------------------------------------------------------------ addresses


@pytest.mark.parametrize(
    "address",
    [PUBLIC, "1.1.1.1", "2606:4700:4700::1111", f"::ffff:{PUBLIC}", f"64:ff9b::{PUBLIC}", "2002:5db8:d822::1"],
)
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("255.255.255.255", "224.0.0.1", "239.1.1.1", "240.0.0.1", "198.18.0.1", "192.0.2.1", "192.0.0.8"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1", "100::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "fec0::1"),
        *("64:ff9b::127.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b:1::1", "64:ff9b:1::8.8.8.8"),
        *("2002:7f00:1::", "2002:a00:1::1", "2002:a9fe:a9fe::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2"),
        *("3fff::1", "192.88.99.1", "2606:4700:4700::1111%eth0", "localhost", "", "1.1.1.1.", "0x7f.1"),
    ],
)
def test_addresses_of_other_networks(address: str) -> None:
    assert not is_public(address)


# ------------------------------------------------------------ servers


Answer = Callable[[socket.socket, str], None]


class Server:
    """Answers each connection on a thread, and notes the heads of requests."""

    def __init__(self, answer: Answer, tls: ssl.SSLContext | None = None) -> None:
        self.heads: list[str] = []
        self.most_at_once = 0
        self._open = 0
        self._answer = answer
        self._tls = tls
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, path: str = "/a.png", host: str = "127.0.0.1") -> str:
        return f"{'https' if self._tls else 'http'}://{host}:{self.port}{path}"

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        wrap = partial(self._tls.wrap_socket, server_side=True) if self._tls else nullcontext
        with suppress(OSError), connection, wrap(connection) as stream:
            self._serve_one(stream if self._tls else connection)

    def _serve_one(self, stream: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head and (data := stream.recv(4096)):
            head += data
        with self._lock:
            self.heads.append(head.decode())
            self._open += 1
            self.most_at_once = max(self.most_at_once, self._open)
        try:
            self._answer(stream, head.decode().split(" ")[1])
        finally:
            with self._lock:
                self._open -= 1


@contextmanager
def serving(answer: Answer, tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    server = Server(answer, tls)
    yield server
    server.close()


def response(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def says(data: bytes) -> Answer:
    return lambda connection, path: connection.sendall(data)


def redirects(to: str, status: str = "302 Found") -> Answer:
    return says(response(b"", status, f"Location: {to}"))


def rule(*servers: Server, seconds: float = 5.0) -> FetchRule:
    return FetchRule(("127.0.0.0/8",), tuple(server.port for server in servers), seconds)


def refusal(url: str, rule: FetchRule, resolve: Resolve = fetching.resolve_host) -> str:
    with pytest.raises(RequestError) as raised:
        Fetcher(rule, resolve).fetch(url)
    text = str(raised.value)
    assert len(text) < 250
    return text


# ------------------------------------------------------------ what is fetched


def test_a_file_comes_whole_by_a_plain_request() -> None:
    with serving(says(response(PNG, "200 OK", "Content-Type: text/html"))) as server:
        assert Fetcher(rule(server)).fetch(server.url("/a%20b.png?x=1#part")) == PNG
    head = server.heads[0].lower()
    assert head.startswith("get /a%20b.png?x=1 http/1.1\r\n")
    assert f"host: 127.0.0.1:{server.port}\r\n" in head
    assert not {"cookie", "authorization", "referer"} & {line.partition(":")[0] for line in head.split("\r\n")}


def test_environment_names_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(says(response(b"of the proxy"))) as proxy, serving(says(response(PNG))) as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url(""))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert Fetcher(rule(server)).fetch(server.url()) == PNG
        assert not proxy.heads


def test_the_name_is_that_of_host_and_certificate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("images.example").configure_cert(tls)
    names: list[str | None] = []
    tls.sni_callback = lambda connection, name, context: names.append(name)
    with serving(says(response(PNG)), tls) as server:
        fetcher = Fetcher(rule(server), lambda host, port: ["127.0.0.1"])
        authority.configure_trust(fetcher._tls)
        assert fetcher.fetch(server.url(host="images.example")) == PNG
        assert names == ["images.example"]
        assert f"Host: images.example:{server.port}" in server.heads[0]
        with pytest.raises(RequestError, match="no valid certificate"):
            fetcher.fetch(server.url(host="other.example"))


def test_redirects_are_followed_within_their_number() -> None:
    def answer(connection: socket.socket, path: str) -> None:
        left = int(path[1:])
        connection.sendall(response(b"", "307 Again", f"Location: {left - 1}") if left else response(PNG))

    with serving(answer) as server:
        assert Fetcher(rule(server)).fetch(server.url(f"/{MAX_REDIRECTS}")) == PNG
        assert "redirects more than 3 times" in refusal(server.url(f"/{MAX_REDIRECTS + 1}"), rule(server))


# ------------------------------------------------------------ names and addresses


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "localhost.", "127.1", "2130706433", "0x7f000001", "0"),
        *("[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]", "[::]", "169.254.169.254"),
        "no-such-name.invalid",
    ],
)
def test_hosts_that_are_not_public_are_refused_alike_and_get_no_connection(host: str) -> None:
    with serving(says(response(PNG))) as server:
        production = FetchRule(ports=(server.port,))
        text = refusal(f"http://{host}:{server.port}/a.png", production)
        assert not server.heads
    assert NOT_PUBLIC in text
    assert host not in text


@pytest.mark.parametrize("private", ["127.0.0.1", "10.0.0.1", "fd00::1", "::ffff:127.0.0.1"])
def test_every_address_of_a_name_must_be_public(private: str) -> None:
    def resolve(host: str, port: int) -> Sequence[str]:
        return [PUBLIC, private]

    assert NOT_PUBLIC in refusal("http://mixed.example/a.png", FetchRule(), resolve)


def test_a_name_is_resolved_once_and_its_address_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that answers otherwise the second time gains nothing."""
    asked: list[str] = []
    connected: list[Any] = []

    def resolve(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return [PUBLIC] if len(asked) == 1 else ["127.0.0.1"]

    def connect(address: Any, *args: Any, **fields: Any) -> socket.socket:
        connected.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    assert "cannot be reached" in refusal("https://rebinding.example/a.png", FetchRule(), resolve)
    assert asked == ["rebinding.example"]
    assert connected == [(PUBLIC, 443)]


def test_a_redirect_is_judged_as_the_url_was(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(says(response(PNG))) as inside:

        def resolve(host: str, port: int) -> Sequence[str]:
            return {"outside.example": ["127.0.0.1"], "inside.example": ["127.0.0.2"]}[host]

        targets = {
            f"http://inside.example:{inside.port}/": NOT_PUBLIC,
            f"http://user:password@outside.example:{inside.port}/": "user name or password",
            "http://outside.example:22/": "has port 22",
            "file:///etc/passwd": "none of http or https",
            "gopher://outside.example/": "none of http or https",
            "http://0177.0.0.1/": "is not valid",
        }
        for target, words in targets.items():
            with serving(redirects(target)) as server:
                outside = FetchRule(("127.0.0.1/32",), (server.port, inside.port))
                assert words in refusal(server.url(host="outside.example"), outside, resolve), target
                assert len(server.heads) == 1
        assert not inside.heads


def test_https_does_not_redirect_to_http() -> None:
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("images.example").configure_cert(tls)
    with serving(says(response(PNG))) as plain, serving(redirects(plain.url()), tls) as server:
        fetcher = Fetcher(rule(server, plain), lambda host, port: ["127.0.0.1"])
        authority.configure_trust(fetcher._tls)
        with pytest.raises(RequestError, match="redirects from https to http"):
            fetcher.fetch(server.url(host="images.example"))
        assert not plain.heads


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://user@example.com/", "user name or password"),
        ("http://:secret@example.com/", "user name or password"),
        ("http://example.com:8080/", "has port 8080; images come from ports 80 and 443 only"),
        ("http://example.com:443/", "has port 443"),
        ("https://example.com:80/", "has port 80"),
        ("http:///a.png", "none of http or https"),
        ("http:a.png", "none of http or https"),
        ("http://exa mple.com/\r\nX: y", "is not valid"),
        ("http://example.com:99999/", "has port 99999"),
        ("http://example.com:x/", "is not valid"),
        (f"http://{'a' * 300}.example/", NOT_PUBLIC),
    ],
)
def test_urls_that_are_not_fetched(url: str, words: str) -> None:
    text = refusal(url, FetchRule())
    assert words in text
    assert "secret" not in text


# ------------------------------------------------------------ hostile servers


def endless_chunks(size: int) -> Answer:
    def answer(connection: socket.socket, path: str) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunks = (b"%x\r\n" % size + bytes(size) + b"\r\n") * max(1, 65_536 // size)
        while True:
            connection.sendall(chunks)

    return answer


def endless(part: bytes) -> Answer:
    def answer(connection: socket.socket, path: str) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n" if b":" in part else b"")
        while True:
            connection.sendall(part * 1000)

    return answer


def trickles(head: bytes) -> Answer:
    def answer(connection: socket.socket, path: str) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(b"x")
            time.sleep(0.05)

    return answer


def silent(connection: socket.socket, path: str) -> None:
    connection.recv(1)


LARGE = f"has more than {MAX_FILE_BYTES} bytes"
SLOW = "takes more than"
BROKEN = "cannot be reached, or breaks off"
SERVERS: dict[str, tuple[Answer, str]] = {
    "declares too much": (says(response(b"", "200 OK", f"Content-Length: {MAX_FILE_BYTES + 1}")[:60]), BROKEN),
    "large": (lambda c, path: c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 20971521\r\n\r\n"), LARGE),
    "without length": (lambda c, path: c.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(MAX_FILE_BYTES + 1)), LARGE),
    "endless chunks": (endless_chunks(65_536), LARGE),
    "endless small chunks": (endless_chunks(1), f"{LARGE}|{SLOW}"),
    "endless interim responses": (endless(b"HTTP/1.1 100 Continue\r\n\r\n"), f"{LARGE}|{SLOW}"),
    "endless headers": (endless(b"X-A: b\r\n"), BROKEN),
    "endless line": (endless(b"X"), BROKEN),
    "slow body": (trickles(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"), SLOW),
    "slow headers": (trickles(b"HTTP/1.1 200 OK\r\nX-A: "), SLOW),
    "slow chunk": (trickles(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfff\r\n"), SLOW),
    "silent": (silent, SLOW),
    "closes": (lambda c, path: None, BROKEN),
    "closes in its body": (says(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc"), BROKEN),
    "no HTTP": (says(b"SSH-2.0-OpenSSH_9.9\r\n"), BROKEN),
    "404": (says(response(b"secret", "404 Not Found")), "answers with status 404"),
    "204": (says(b"HTTP/1.1 204 No Content\r\n\r\n"), "answers with status 204"),
    "redirect without a place": (says(response(b"", "302 Found")), "answers with status 302"),
    "redirect to itself": (redirects("/"), "redirects more than"),
}


@pytest.mark.parametrize("name", SERVERS)
def test_hostile_server_costs_its_limit_at_most(name: str) -> None:
    answer, words = SERVERS[name]
    with serving(answer) as server:
        text = refusal(server.url(), rule(server, seconds=1.5))
    assert any(word in text for word in words.split("|")), text
    assert "secret" not in text


# ------------------------------------------------------------ in a router


def load(sources: Sequence[ImageSource], rule: FetchRule, metrics: RouterMetrics | None = None) -> list[Any]:
    async def body() -> list[Any]:
        loader = ImageLoader(1 << 30, metrics or RouterMetrics(), fetchers=Fetchers(rule))
        try:
            return list(await asyncio.gather(loader.load(sources, ACCEPTED), return_exceptions=True))
        finally:
            await loader.close()

    return asyncio.run(body())


def test_an_image_by_url_is_the_one_sent_as_data() -> None:
    with serving(says(response(PNG))) as server:
        sources = [ImageSource("", NAME, server.url()), ImageSource(base64.b64encode(PNG).decode(), NAME)]
        [images] = load(sources, rule(server))
    assert images[0] is images[1]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (says(response(b"<html>")), f"{NAME}: the file is no complete PNG"),
        (says(response(b"", "403 Forbidden")), f"{NAME}: the server of its URL answers with status 403"),
    ],
)
def test_errors_name_the_image(answer: Answer, words: str) -> None:
    with serving(answer) as server:
        [error] = load([ImageSource("", NAME, server.url())], rule(server))
    assert isinstance(error, RequestError)
    assert str(error).startswith(words)
    assert error.param == NAME


def test_metrics_count_fetches() -> None:
    def answer(connection: socket.socket, path: str) -> None:
        connection.sendall(response(PNG) if path == "/a.png" else response(b"", "404 Not Found"))

    metrics = RouterMetrics()
    with serving(answer) as server:
        load([ImageSource("", NAME, server.url())], rule(server), metrics)
        load([ImageSource("", NAME, server.url("/b.png"))], rule(server), metrics)
    exported = metrics.export().decode()
    for line in (
        'pdserve_image_fetch_seconds_count{outcome="fetched"} 1.0',
        'pdserve_image_fetch_seconds_count{outcome="refused"} 1.0',
        'pdserve_image_fetch_seconds_count{outcome="failed"} 0.0',
    ):
        assert line in exported


def test_a_request_has_few_connections_and_few_urls() -> None:
    def answer(connection: socket.socket, path: str) -> None:
        time.sleep(0.02)
        connection.sendall(response(PNG))

    with serving(answer) as server:
        sources = [ImageSource("", NAME, server.url())] * MAX_URLS
        [images] = load(sources, rule(server))
        assert len(images) == MAX_URLS
        assert server.most_at_once <= URLS_AT_ONCE < MOST_FETCHERS
        [error] = load([*sources, sources[0]], rule(server))
        assert f"more than {MAX_URLS} images by URL" in str(error)


def test_requests_that_wait_too_long_for_others_get_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetchers, "_REQUEST_SECONDS", 1.0)
    with serving(silent) as server:
        sources = [ImageSource("", NAME, server.url())] * (URLS_AT_ONCE + 1)
        [error] = load(sources, rule(server))
    assert isinstance(error, RequestError | Overloaded)
