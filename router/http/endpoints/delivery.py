"""Answers over HTTP: JSON bodies in pieces, and server-sent events as they come, as fast as the client reads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

from starlette.types import Receive, Scope, Send

from pdserve.errors import DeadlineExceeded, PdserveError
from router.dialect.events import Event, server_sent
from router.errors import ClientDisconnected, ErrorFormat
from router.gate.rate_limits import Headers
from router.generation.generation import RequestGeneration
from router.http.error_responses import error_response

logger = logging.getLogger(__name__)

_DEADLINE_GRACE = 0.5  # seconds that nodes get to end a request by its deadline before the router does
_DELIVERY_GRACE = 60.0  # seconds beyond the deadline in which a slow client may read the rest
COMMENT = b": keep-alive\n\n"  # readers of server-sent events skip lines that begin with a colon
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # makes nginx forward each chunk
]


@contextmanager
def deadline(generation: RequestGeneration) -> Iterator[None]:
    """Fail the request when its time is over, unless the nodes have done so."""
    options = generation.options
    loop = asyncio.get_running_loop()
    text = f"the request exceeded its time limit of {options.timeout:g} s; request fewer tokens"
    ends = loop.time() + options.remaining + _DEADLINE_GRACE
    timer = loop.call_at(ends, lambda: generation.fail(DeadlineExceeded(text)))
    try:
        yield
    finally:
        timer.cancel()


@asynccontextmanager
async def delivery(remaining: float, request_id: str, log_fields: Mapping[str, object]) -> AsyncIterator[None]:
    """Raise ClientDisconnected when the client has not read the response in time.

    ``remaining`` seconds are left until the request's deadline; the client has _DELIVERY_GRACE more to read the rest.
    """
    limit = asyncio.timeout(remaining + _DELIVERY_GRACE)
    try:
        async with limit:
            yield
    except TimeoutError as exc:
        if not limit.expired():
            raise
        text = "request %s: the client reads too slowly; closing its connection"
        logger.warning(text, request_id, extra=log_fields)
        raise ClientDisconnected from exc


class HttpWriter:
    """AnswerWriter of one HTTP request.

    All responses share ``turns``: after each piece of a large answer its writer waits for its turn, so that one large
    answer advances per pass of the event loop.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        errors: ErrorFormat,
        turns: asyncio.Lock,
        keep_alive: float,
    ) -> None:
        self.keep_alive = keep_alive
        self._scope = scope
        self._receive = receive
        self._send = send
        self._errors = errors
        self._turns = turns

    async def send_json(self, pieces: Iterator[bytes], headers: Headers, disconnected: Callable[[], bool]) -> None:
        """Send at least one piece."""
        body = next(pieces)
        following = next(pieces, None)
        headers = [(b"content-type", b"application/json"), *headers]
        if following is None:
            headers.append((b"content-length", b"%d" % len(body)))
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        while following is not None:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            await self.turn()
            if disconnected():
                raise ClientDisconnected
            body = following
            following = next(pieces, None)
        await self._send({"type": "http.response.body", "body": body})

    async def begin_events(self, headers: Headers) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, *headers]})

    def send_events(self, events: Sequence[Event], last: bool) -> Awaitable[None]:  # no coroutine per token
        data = server_sent(events[0]) if len(events) == 1 else b"".join(map(server_sent, events))
        return self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def send_sign_of_life(self, ping: Event | None) -> None:
        data = COMMENT if ping is None else server_sent(ping)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def send_error(self, error: PdserveError, request_id: str) -> None:
        await error_response(error, self._errors, request_id)(self._scope, self._receive, self._send)

    async def turn(self) -> None:
        async with self._turns:
            await asyncio.sleep(0)
