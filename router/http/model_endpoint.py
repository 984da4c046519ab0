"""Base of the endpoints that compute with a model: from an HTTP request through the gate to its response.

Raw ASGI, because a stream has a chunk per token.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from starlette.types import Receive, Scope, Send

from pdserve.errors import PdserveError
from pdserve.rpc.http_connections import abort_connection
from router.errors import ClientDisconnected
from router.gate.admission import RequestAdmission
from router.gate.rate_limits import Headers
from router.http.authentication import address_of, client_of
from router.http.body_reader import BodyReader
from router.http.error_responses import error_response
from router.http.request_accounting import RequestAccounting
from router.service import Service

logger = logging.getLogger(__name__)

_DELIVERY_GRACE = 60.0  # seconds beyond the deadline in which a slow client may read the rest

Body = TypeVar("Body")


class ModelEndpoint(ABC, Generic[Body]):
    """ASGI application of one path."""

    def __init__(self, service: Service, bodies: BodyReader, name: str, parse: Callable[[bytes], Body]) -> None:
        self._service = service
        self._bodies = bodies
        self._name = name
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, client = self._service, client_of(scope)
        accounting = RequestAccounting(service, self._name, client, scope)
        try:
            with service.admission.enter(client, address_of(scope)) as admission:
                body = await self._bodies.read(receive, self._parse)
                async with _watch_disconnect(receive) as disconnected:
                    accounting.finished(await self._respond(body, send, admission, accounting, disconnected))
        except PdserveError as exc:
            accounting.failed(exc)
            response = error_response(exc, scope["path"], accounting.request_id)
            await response(scope, receive, send)
        except ClientDisconnected:
            accounting.disconnected()
            abort_connection(scope)
        finally:
            accounting.close()

    @abstractmethod
    async def _respond(
        self,
        body: Body,
        send: Send,
        admission: RequestAdmission,
        accounting: RequestAccounting,
        disconnected: asyncio.Future[None],
    ) -> str:
        """Send the response and return the outcome. Raises PdserveError only before the first byte is sent."""


@asynccontextmanager
async def _watch_disconnect(receive: Receive) -> AsyncIterator[asyncio.Future[None]]:
    """Yield a future that is done once the client has disconnected."""
    disconnected: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected.set_result(None)

    watcher = asyncio.create_task(watch())
    try:
        yield disconnected
    finally:
        watcher.cancel()


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
