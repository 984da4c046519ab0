"""Base of the endpoints that compute with a model: from an HTTP request through the gate to its response.

Raw ASGI, because a stream has a chunk per token.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic

from starlette.types import Receive, Scope, Send

from pdserve.errors import PdserveError
from pdserve.http.connections import abort_connection
from router.dialect.answer_writer import AnswerWriter
from router.dialect.dialect import BodyT, Dialect
from router.errors import ClientDisconnected
from router.gate.admission import RequestAdmission
from router.http.authentication import address_of, client_of
from router.http.endpoints.body_reader import BodyReader
from router.http.endpoints.delivery import HttpWriter
from router.http.endpoints.request_accounting import RequestAccounting
from router.service import Service


class ModelEndpoint(ABC, Generic[BodyT]):
    """ASGI application of the paths of one dialect."""

    def __init__(self, service: Service, bodies: BodyReader, dialect: Dialect[BodyT]) -> None:
        self._service = service
        self._bodies = bodies
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = HttpWriter(
            scope,
            receive,
            send,
            errors=self._dialect.errors,
            turns=self._service.turns,
            keep_alive=self._service.options.sse_keep_alive,
        )
        await self.answer(scope, receive, writer)

    async def answer(self, scope: Scope, receive: Receive, writer: AnswerWriter) -> None:
        """Answer one request. ``scope`` and ``receive`` are of HTTP, also for a message of a WebSocket."""
        service = self._service
        client = client_of(scope)
        accounting = RequestAccounting(service, self._dialect, client, scope=scope)
        try:
            with service.admission.enter(client, address_of(scope)) as admission:
                body = await self._bodies.read(receive, self._dialect.parse)
                async with _watch_disconnect(receive) as disconnected:
                    outcome = await self._respond(
                        body, writer, admission, accounting=accounting, disconnected=disconnected
                    )
                    accounting.finished(outcome)
        except PdserveError as exc:
            accounting.failed(exc)
            await writer.send_error(exc, accounting.request_id)
        except ClientDisconnected:
            accounting.disconnected()
            abort_connection(scope)
        finally:
            accounting.close()

    @abstractmethod
    async def _respond(
        self,
        body: BodyT,
        writer: AnswerWriter,
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
