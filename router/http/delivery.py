"""Sending responses: JSON bodies in pieces, and events as they come, as fast as the client reads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager

from starlette.types import Send

from router.completions_api.response_writers import BodyResponse, EventStreamResponse
from router.errors import ClientDisconnected, status_and_type
from router.gate.rate_limits import Headers
from router.http.node_headers import node_headers

logger = logging.getLogger(__name__)

_DELIVERY_GRACE = 60.0  # seconds beyond the deadline in which a slow client may read the rest
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # makes nginx forward each chunk
]


@asynccontextmanager
async def delivery(remaining: float, request_id: str, log_fields: Mapping[str, object]) -> AsyncIterator[None]:
    """Disconnect a client that reads the response beyond the ``remaining`` seconds and the grace period."""
    try:
        async with asyncio.timeout(remaining + _DELIVERY_GRACE):
            yield
    except TimeoutError as exc:
        text = "request %s: the client reads too slowly; closing its connection"
        logger.warning(text, request_id, extra=log_fields)
        raise ClientDisconnected from exc


async def send_pieces(
    send: Send, pieces: Iterator[bytes], headers: Headers, turns: asyncio.Lock, disconnected: Callable[[], bool]
) -> None:
    """Send a JSON body. ``turns`` is held for each further piece, so that one is encoded per turn of the loop."""
    body, following = next(pieces), next(pieces, None)
    headers = [(b"content-type", b"application/json"), *headers]
    if following is None:
        headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while following is not None:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        async with turns:
            await asyncio.sleep(0)
        if disconnected():
            raise ClientDisconnected
        body, following = following, next(pieces, None)
    await send({"type": "http.response.body", "body": body})


async def send_body(send: Send, response: BodyResponse, headers: Headers, turns: asyncio.Lock) -> str:
    while not response.ended and not response.disconnected:
        response.wake.clear()
        await response.wake.wait()
    if response.error is not None:
        raise response.error
    if response.disconnected:
        raise ClientDisconnected
    headers = [*headers, *node_headers(response.generation)]
    await send_pieces(send, response.body(), headers, turns, lambda: response.disconnected)
    return "ok"


async def send_stream(send: Send, response: EventStreamResponse, headers: Headers, turns: asyncio.Lock) -> str:
    await response.wake.wait()
    if response.error is not None and not response.started:
        raise response.error
    headers = [*STREAM_HEADERS, *headers, *node_headers(response.generation)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while not response.disconnected:
        data = response.take()
        last = response.ended and not response.has_more
        await send({"type": "http.response.body", "body": data, "more_body": not last})
        response.sent()
        if last:
            return "ok" if response.error is None else status_and_type(response.error)[1]
        if response.has_more:
            async with turns:
                await asyncio.sleep(0)
        else:
            await response.wake.wait()
    raise ClientDisconnected
