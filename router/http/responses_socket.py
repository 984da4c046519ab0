"""WebSockets at /v1/responses, as Open Responses specifies them: each message creates a response, one after the other.

    message ──► request to SocketTurns, as over HTTP: key, admission, limits, accounting
    events  ◄── its response, or {"type": "error", "status": …, "error": …}

The latest response stays with its connection, so a turn may continue it without a store. A failed turn drops it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.errors import RequestError, shown
from router.completions_api.body_parsing import parse_json
from router.completions_api.generate_body import GenerateBody
from router.errors import ClientDisconnected
from router.generation.job import GenerationOptions, Job
from router.http.error_responses import http_error, server_error
from router.http.responses_endpoint import ResponsesEndpoint
from router.responses_api.input_items import Item, input_items, reference_of
from router.responses_api.output_objects import ResponseObject
from router.responses_api.output_writers import OutputItemsResponse
from router.responses_api.request import ResponsesBody, responses_body
from router.responses_api.stored_items import ConversationBudget, StoredItems, encode_items, encode_output
from router.service import ServedModel
from router.text.chat.output_parsing import OutputParsing
from router.websocket_connections import set_idle

logger = logging.getLogger(__name__)

_MAX_SECONDS = 3600.0  # of a connection
_KEPT_BYTES = 64 * 1024 * 1024  # of latest responses with their conversations, of all connections
_END = b"\n\n"  # of an event


def parse_turn(data: bytes) -> ResponsesBody:
    """Raises RequestError."""
    fields = parse_json(data)
    kind = fields.pop("type", None)
    if kind != "response.create":
        raise RequestError(f"a message has type {shown(kind)}; send 'response.create' and the fields of a body", "type")
    if fields.get("background") or fields.get("stream") is False:
        name = "background" if fields.get("background") else "stream"
        raise RequestError(f"{name} is a parameter of HTTP; leave it out, responses arrive as events", name)
    return responses_body({**fields, "stream": True})


class KeptMemory:
    """Bytes of the latest responses of all connections."""

    def __init__(self) -> None:
        self.num_bytes = 0


class _Kept(msgspec.Struct):
    """The latest response of a connection, with its conversation."""

    id: str
    items: StoredItems

    @property
    def num_bytes(self) -> int:
        return self.items.num_bytes


class SocketTurns(ResponsesEndpoint):
    """The endpoint of one connection."""

    def __init__(self, *args: Any, memory: KeptMemory) -> None:
        super().__init__(*args)
        self._parse = parse_turn
        self._memory = memory
        self._latest: _Kept | None = None
        self._final: tuple[ResponseObject, list[Item]] | None = None  # of the present turn, with the items before it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._final = None
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.forget()
        final, self._final = self._final, None
        if final is not None:
            kept = await asyncio.to_thread(_kept, *final)
            if self._memory.num_bytes + kept.num_bytes <= _KEPT_BYTES:
                self._latest = kept
                self._memory.num_bytes += kept.num_bytes

    def forget(self) -> None:
        """Drop the latest response. Idempotent."""
        if self._latest is not None:
            self._memory.num_bytes -= self._latest.num_bytes
            self._latest = None

    async def _with_named_items(self, body: ResponsesBody, owner: str) -> ResponsesBody:
        previous, latest = body.request.previous_response_id, self._latest
        if latest is None or previous != latest.id:
            if previous is not None and self._store is None:
                text = f"no response {shown(previous)} is kept on this connection; send the whole conversation"
                raise RequestError(text, "previous_response_id", "previous_response_not_found")
            return await super()._with_named_items(body, owner)
        return await asyncio.to_thread(_continued, body, latest, self._service.options.max_body_bytes)

    def _make_response(
        self,
        model: ServedModel,
        body: GenerateBody,
        jobs: Sequence[Job],
        parsing: OutputParsing | None,
        options: GenerationOptions,
    ) -> OutputItemsResponse:
        response = super()._make_response(model, body, jobs, parsing, options)
        assert isinstance(body, ResponsesBody)
        items, store = body.items, response.on_final

        def keep(final: ResponseObject) -> None:
            store(final)
            if final.status in ("completed", "incomplete"):
                self._final = final, items

        response.on_final = keep
        return response


def _kept(final: ResponseObject, before: list[Item]) -> _Kept:
    return _Kept(final.id, encode_items(before).followed_by(encode_output(final.output)))


def _continued(body: ResponsesBody, latest: _Kept, max_bytes: int) -> ResponsesBody:
    """Raises RequestError."""
    places, own = latest.items.places, input_items(body.request.input)
    budget = ConversationBudget(max_bytes)
    budget.take(places, 0, len(places), "previous_response_id")
    before = latest.items.decoded()
    by_id = {place.id: at for at, place in enumerate(places)}
    items = list(before)
    for item in own:
        at = by_id.get(reference_of(item) or "")
        if at is not None:
            budget.take(places, at, at + 1, "input")
        items.append(item if at is None else before[at])
    return body.with_items(items)


class ResponsesSocket:
    """ASGI application of WebSockets.

    ``make_endpoint`` returns the endpoint of a connection, and what is called at its end. ``origins``: other web pages
    may not connect, as a browser sends no preflight request for WebSockets; "*" allows all.
    """

    def __init__(self, make_endpoint: Callable[[], tuple[ASGIApp, Callable[[], None]]], origins: Sequence[str]) -> None:
        self._make_endpoint = make_endpoint
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"), None)
        if origin is not None and not self._origins & {"*", origin}:
            text = f"pages of {shown(origin)} may not connect; allow them with --cors-origin"
            await http_error(403, text, scope["path"])(scope, receive, send)
            return
        await receive()
        await send({"type": "websocket.accept"})
        endpoint, close = self._make_endpoint()
        messages = _Messages(receive)
        # A turn has an id of its own, which names its response.
        headers = [header for header in scope["headers"] if header[0] != b"x-request-id"]
        http = {**scope, "type": "http", "method": "POST", "headers": headers}
        try:
            async with asyncio.timeout(_MAX_SECONDS) as limit:
                while await messages.next():
                    ends = limit.when()
                    limit.reschedule(None)  # a response goes on to its end
                    await _take_turn(endpoint, http, messages, send)
                    limit.reschedule(ends)
        except TimeoutError:
            text = f"a connection lasts {_MAX_SECONDS:.0f} s; open a new one"
            error = {"code": "websocket_connection_limit_reached", "message": text, "param": None}
            await _send_json(send, {"type": "error", "status": 400, "error": error})
            await send({"type": "websocket.close", "code": 1000})
        except (ClientDisconnected, OSError):
            pass
        finally:
            messages.close()
            close()


async def _take_turn(endpoint: ASGIApp, scope: Scope, messages: _Messages, send: Send) -> None:
    try:
        await endpoint(scope, messages.receive, _TurnEvents(send).send)
    except (ClientDisconnected, OSError):
        raise
    except Exception:
        logger.exception("a turn of a WebSocket failed")
        await server_error(scope["path"])(scope, messages.receive, _TurnEvents(send).send)
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
        # In two parts, so that large bodies count in the memory of BodyReader.
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


class _TurnEvents:
    """Sends the server-sent events of a response as messages, or its error as one message."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._status = 200
        self._buffer = bytearray()  # of an incomplete event

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return
        searched = max(0, len(self._buffer) - 1)
        self._buffer += message.get("body", b"")
        if self._status != 200:
            if not message.get("more_body", False):
                error = msgspec.json.decode(self._buffer)["error"]
                error["code"] = error["code"] or error["type"]
                await _send_json(self._send, {"type": "error", "status": self._status, "error": error})
            return
        while (end := self._buffer.find(_END, searched)) >= 0:
            event = self._buffer[:end]
            del self._buffer[: end + len(_END)]
            searched = 0
            await _send_text(self._send, event[event.index(b"data: ") + 6 :].decode())


async def _send_json(send: Send, value: dict[str, Any]) -> None:
    await _send_text(send, msgspec.json.encode(value).decode())


async def _send_text(send: Send, text: str) -> None:
    try:
        await send({"type": "websocket.send", "text": text})
    except (OSError, RuntimeError) as exc:  # the connection is closed
        raise ClientDisconnected from exc
