"""WebSockets at /v1/responses, as Open Responses specifies them: each message creates a response, one after the other.

message ──► request to the endpoint, as over HTTP: key, admission, limits, accounting
events  ◄── its response, or {"type": "error", "status": …, "error": …}
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

import msgspec
from starlette.types import Message, Receive, Scope, Send

from pdserve.errors import PdserveError, shown
from router.dialect.events import Event
from router.errors import OPENAI_ERRORS, ClientDisconnected, ErrorInfo, error_info, status_and_type
from router.gate.rate_limits import Headers
from router.http.authentication import KeyCheck
from router.http.endpoints.body_reader import BodyReader
from router.http.endpoints.generate_endpoint import GenerateEndpoint
from router.http.error_responses import SERVER_FAILURE, http_error
from router.responses_api.dialect import ResponsesDialect
from router.responses_api.request import ResponsesBody
from router.responses_api.turns import KeptMemory, SocketTurns
from router.service import Service
from router.websocket_connections import set_idle

logger = logging.getLogger(__name__)

_MAX_SECONDS = 3600.0  # lifetime of a connection


class ResponsesSocket:
    """ASGI application of WebSockets.

    Other web pages than the service's ``cors_origins`` may not connect, as a browser sends no preflight request for
    WebSockets; "*" allows all.
    """

    def __init__(
        self, service: Service, bodies: BodyReader, dialect: ResponsesDialect, key_check: KeyCheck | None
    ) -> None:
        self._service = service
        self._bodies = bodies
        self._dialect = dialect
        self._key_check = key_check
        self._memory = KeptMemory()
        self._origins = frozenset(service.options.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"), None)
        if origin is not None and not self._origins & {"*", origin}:
            text = f"pages of {shown(origin)} may not connect; allow them with --cors-origin"
            await http_error(403, text, OPENAI_ERRORS)(scope, receive, send)
            return
        await receive()
        await send({"type": "websocket.accept"})
        turns = SocketTurns(self._dialect, self._memory, self._service.options.max_body_bytes)
        endpoint = GenerateEndpoint(self._service, self._bodies, turns)
        messages = _Messages(receive)
        writer = SocketWriter(send, self._service.turns)
        # Each turn has its own id, which names its response.
        headers = [header for header in scope["headers"] if header[0] != b"x-request-id"]
        http = {**scope, "type": "http", "method": "POST", "headers": headers}
        try:
            async with asyncio.timeout(_MAX_SECONDS) as limit:
                while await messages.next():
                    ends = limit.when()
                    limit.reschedule(None)  # a running response is not cut off
                    await self._take_turn(endpoint, turns, http, messages=messages, writer=writer)
                    limit.reschedule(ends)
        except TimeoutError:
            text = f"a connection lasts {_MAX_SECONDS:.0f} s; open a new one"
            await writer.send(_TimeLimit("websocket_connection_limit_reached", text, None), status=400)
            await send({"type": "websocket.close", "code": 1000})
        except (ClientDisconnected, OSError):
            pass
        finally:
            messages.close()
            turns.forget()

    async def _take_turn(
        self,
        endpoint: GenerateEndpoint[ResponsesBody],
        turns: SocketTurns,
        scope: Scope,
        *,
        messages: _Messages,
        writer: SocketWriter,
    ) -> None:
        try:
            refusal = None if self._key_check is None else self._key_check.refusal(scope)  # a key may be revoked
            if refusal is not None:
                await writer.send_error(refusal)
            else:
                async with turns.turn():
                    await endpoint.answer(scope, messages.receive, writer)
        except (ClientDisconnected, OSError):
            raise
        except Exception:
            logger.exception("a turn of a WebSocket failed")
            await writer.send_error(PdserveError(SERVER_FAILURE))
        set_idle(scope)


class _Messages:
    """Messages as bodies of requests. At most one is read ahead; the others stay in the connection."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ahead: asyncio.Future[Message] | None = None
        self._parts: list[Message] = []

    async def next(self) -> bool:
        """Wait for the next message; False: the client has disconnected."""
        message = await self._read_ahead()
        self._ahead = None
        if message["type"] != "websocket.receive":
            return False
        # The message has two parts, so that BodyReader counts the memory of large bodies.
        end: Message = {"type": "http.request", "body": b"", "more_body": False}
        self._parts = [end, {"type": "http.request", "body": message["bytes"], "more_body": True}]
        return True

    async def receive(self) -> Message:
        """The body of the message from ``next``, then the end of the connection, if it comes during the turn."""
        if self._parts:
            return self._parts.pop()
        if (await self._read_ahead())["type"] == "websocket.receive":
            await asyncio.get_running_loop().create_future()  # the next message waits for the end of this turn
        return {"type": "http.disconnect"}

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()

    async def _read_ahead(self) -> Message:
        if self._ahead is None:
            self._ahead = asyncio.ensure_future(self._receive())
        return await asyncio.shield(self._ahead)


class _TimeLimit(msgspec.Struct):
    """The end of a connection, as OpenAI writes it: an ErrorInfo without a type."""

    code: str
    message: str
    param: None


class _ErrorEvent(msgspec.Struct, tag="error"):
    status: int
    error: ErrorInfo | _TimeLimit


class SocketWriter:
    """AnswerWriter of a WebSocket: each event is a message. ``turns`` is held for each part of a large one."""

    keep_alive = 0.0  # WebSockets have pings of their own

    def __init__(self, send: Send, turns: asyncio.Lock) -> None:
        self._send = send
        self._turns = turns
        self._parts = bytearray()  # parts of a large event that is incomplete

    async def send_json(self, pieces: Iterator[bytes], headers: Headers, disconnected: Callable[[], bool]) -> None:
        raise AssertionError("turns are answered with events")

    async def begin_events(self, headers: Headers) -> None:
        self._parts.clear()

    async def send_events(self, events: Sequence[Event], last: bool) -> None:
        for event in events:
            if event.begins and event.ends:
                await self._send_text(event.data.decode())
                continue
            self._parts += event.data
            if event.ends:
                text = self._parts.decode()
                self._parts.clear()
                await self._send_text(text)

    async def send_sign_of_life(self, ping: Event | None) -> None:
        raise AssertionError("WebSockets have pings of their own")

    async def send_error(self, error: PdserveError, request_id: str = "") -> None:
        info = error_info(error)
        info.code = info.code or info.type
        await self.send(info, status=status_and_type(error)[0])

    async def send(self, error: ErrorInfo | _TimeLimit, *, status: int) -> None:
        await self._send_text(msgspec.json.encode(_ErrorEvent(status, error)).decode())

    async def turn(self) -> None:
        async with self._turns:
            await asyncio.sleep(0)

    async def _send_text(self, text: str) -> None:
        try:
            await self._send({"type": "websocket.send", "text": text})
        except (OSError, RuntimeError) as exc:  # the connection is closed
            raise ClientDisconnected from exc
