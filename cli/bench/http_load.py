"""A client of OpenAI-compatible servers for measurements: streamed completions, and the arrival time of each token.

The client parses HTTP with httptools and events with msgspec, without a task switch per event, so that one process can
follow tens of thousands of tokens/s. Each request has a connection of its own. A token's time is that of the read from
the socket that completed its event.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools
import msgspec

from pdserve.errors import ConfigError, PdserveError, cut, shown

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
LISTING_SECONDS = 10.0
PERCENTILES = (50, 90, 99)


class ServerError(PdserveError):
    """A server does not answer as expected."""


@dataclass
class Trace:
    """A request's times in seconds of time.perf_counter()."""

    due: float
    start: float = 0.0  # time of sending
    tokens: list[float] = field(default_factory=list)  # arrivals; one per event if the server sends no token ids
    num_tokens: int = 0  # output tokens
    prompt_tokens: int = 0  # reported by the server
    cached_tokens: int = 0  # prompt tokens from its prefix cache
    image_tokens: int | None = None  # prompt tokens that are images; None: the server does not report them
    reports_cache: bool = False  # False: the server does not report cached tokens
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.start

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.tokens)]


class Endpoint(NamedTuple):
    """The base URL of a server, in parts."""

    host: str
    port: int
    tls: bool
    authority: str  # HOST[:PORT]
    path: str  # without a slash at its end
    headers: dict[str, str]  # sent with every request

    @classmethod
    def of(cls, url: str, key: str = "") -> Endpoint:
        """Parse a URL; the default of the API key is OPENAI_API_KEY. Raises ConfigError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"URL {shown(url)} is invalid; use http://HOST:PORT")
        key = key or os.environ.get("OPENAI_API_KEY", "")
        tls = parts.scheme == "https"
        return cls(
            parts.hostname,
            parts.port or (443 if tls else 80),
            tls,
            parts.netloc.rpartition("@")[2],
            parts.path.rstrip("/"),
            {"Authorization": f"Bearer {key}"} if key else {},
        )

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.path}"

    async def exchange(
        self, method: str, path: str, body: bytes, take: Callable[[bytes], None], headers: dict[str, str] | None = None
    ) -> int:
        """Send a request, pass the pieces of the answer's body to ``take`` and return the status. Raises OSError."""
        headers = self.headers | (headers or {})
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"Host: {self.authority}", "Connection: close"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        request = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
        loop = asyncio.get_running_loop()
        transport, exchange = await loop.create_connection(
            lambda: _Exchange(take), self.host, self.port, ssl=self.tls or None
        )
        try:
            transport.write(request)
            return await exchange.status
        finally:
            transport.abort()


async def first_model(endpoint: Endpoint) -> str:
    """Return the first model that a server lists. Raises ServerError."""
    answer = bytearray()
    try:
        async with asyncio.timeout(LISTING_SECONDS):
            status = await endpoint.exchange("GET", "/v1/models", b"", answer.extend)
        if status == 200:
            return str(json.loads(answer)["data"][0]["id"])
        problem = f"HTTP {status}: {cut(answer.decode(errors='replace'))}"
    except (OSError, ValueError, LookupError, TimeoutError) as exc:
        problem = f"{type(exc).__name__}: {exc}"
    raise ServerError(f"{endpoint.url}/v1/models: {problem}; start the server or name a --model")


class _Exchange(asyncio.Protocol):
    """A connection for one request; its methods ``on_…`` are called by the parser."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.on_body = take
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._fail(ConnectionError(f"invalid answer: {exc.__context__ or exc}"))

    def on_message_complete(self) -> None:
        if not self.status.done():
            self.status.set_result(self._parser.get_status_code())

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionError("the server closed the connection before the end of its answer"))

    def _fail(self, exc: Exception) -> None:
        if not self.status.done():
            self.status.set_exception(exc)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    text: str = ""
    delta: _Delta | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta or _Delta()
        return bool(self.text or delta.content or delta.reasoning_content or delta.reasoning)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    image_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class StreamReader(ABC):
    """Records the tokens of server-sent events in a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.other = b""  # lines that are no events, for example an error's body
        self._rest = b""

    @abstractmethod
    def take(self, data: bytes, now: float) -> None:
        """Record the tokens of one event, a JSON object."""

    def feed(self, data: bytes) -> None:
        now = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self.take(line[6:], now)
            elif not line.startswith(b"data:"):
                self.other += line

    def end(self) -> None:
        self.other += self._rest


class EventReader(StreamReader):
    """Reads the events of a completion or chat in OpenAI's protocol."""

    _decoder = msgspec.json.Decoder(_Event)

    def __init__(self, trace: Trace, token_ids: list[int] | None = None) -> None:
        """``token_ids`` receives the tokens themselves, if the server sends their ids."""
        super().__init__(trace)
        self.token_ids = token_ids

    def take(self, data: bytes, now: float) -> None:
        event = self._decoder.decode(data)
        trace = self.trace
        if event.error is not None:
            trace.error = cut(str(event.error))
        for choice in event.choices:
            arrived = len(choice.token_ids) if choice.token_ids is not None else choice.has_text
            trace.tokens += [now] * arrived
            trace.num_tokens += arrived
            if self.token_ids is not None and choice.token_ids is not None:
                self.token_ids += choice.token_ids
        if event.usage is not None:
            trace.num_tokens = event.usage.completion_tokens or trace.num_tokens
            details = event.usage.prompt_tokens_details
            trace.prompt_tokens = event.usage.prompt_tokens
            trace.reports_cache = details is not None and details.cached_tokens is not None
            trace.cached_tokens = (details and details.cached_tokens) or 0
            trace.image_tokens = None if details is None else details.image_tokens


async def complete(
    endpoint: Endpoint,
    body: bytes,
    num_tokens: int | None,
    trace: Trace,
    timeout: float,
    headers: dict[str, str] | None = None,
    token_ids: list[int] | None = None,
    path: str = COMPLETIONS,
) -> None:
    """Send a body of ``completion_body``, or of ``chat_body`` to CHATS, and fill in the trace.

    The trace gets an error instead of an exception. An answer without ``num_tokens`` tokens is an error; None accepts
    any number. ``token_ids`` receives the tokens.
    """
    await stream(endpoint, path, body, EventReader(trace, token_ids), timeout, headers)
    if not trace.error and num_tokens is not None and trace.num_tokens != num_tokens:
        trace.error = f"{trace.num_tokens} tokens instead of {num_tokens}"
    elif not trace.error and not trace.tokens:
        trace.error = "no event with text; the server must support return_token_ids"


async def stream(
    endpoint: Endpoint,
    path: str,
    body: bytes,
    reader: StreamReader,
    timeout: float,
    headers: dict[str, str] | None = None,
) -> None:
    """Send a body and let ``reader`` read the answer. Its trace gets the time of sending, and any error."""
    trace = reader.trace
    trace.start = trace.start or time.perf_counter()
    try:
        async with asyncio.timeout(timeout):
            status = await endpoint.exchange("POST", path, body, reader.feed, headers)
    except TimeoutError:
        trace.error = trace.error or f"no end within {timeout:g} s"
        return
    except OSError as exc:
        trace.error = trace.error or f"{type(exc).__name__}: {exc}"
        return
    reader.end()
    if status != 200:
        trace.error = f"HTTP {status}: {cut(reader.other.decode(errors='replace'))}"


def percentiles(seconds: Iterable[float]) -> dict[str, float]:
    """Return percentiles and the maximum in ms; empty input gives an empty result."""
    values = list(seconds)
    if not values:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return {f"p{p}": round(cuts[p - 1] * 1e3, 3) for p in PERCENTILES} | {"max": round(max(values) * 1e3, 3)}
