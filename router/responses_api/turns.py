"""The dialect of one WebSocket connection at /v1/responses, as Open Responses specifies it.

Each message creates a response. The latest one stays with its connection, so a turn may continue it without a store. A
failed turn drops it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from pdserve.errors import RequestError, shown
from router.completions_api.body_parsing import parse_json
from router.dialect.dialect import GenerateDialect, Prepared
from router.generation.job import GenerationOptions
from router.responses_api.dialect import ResponsesDialect
from router.responses_api.input_items import Item, input_items, reference_of
from router.responses_api.output_objects import ResponseObject
from router.responses_api.output_writers import OutputItemsResponse
from router.responses_api.request import ResponsesBody, responses_body
from router.responses_api.stored_items import ConversationBudget, StoredItems, encode_items, encode_output
from router.service import ServedModel

_KEPT_BYTES = 64 * 1024 * 1024  # latest responses and their conversations, over all connections


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


class SocketTurns(GenerateDialect[ResponsesBody]):
    """``max_bytes`` bounds the conversation that a turn continues."""

    name = ResponsesDialect.name
    trace_name = ResponsesDialect.trace_name
    paths = ()

    def __init__(self, responses: ResponsesDialect, memory: KeptMemory, max_bytes: int) -> None:
        self._responses = responses
        self._memory = memory
        self._max_bytes = max_bytes
        self._latest: _Kept | None = None
        self._final: tuple[ResponseObject, list[Item]] | None = None  # this turn's response, and the items before it

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Drop the latest response at the end of a turn, and keep the one of this turn."""
        self._final = None
        try:
            yield
        finally:
            self.forget()
        if self._final is None:
            return
        final, items = self._final
        self._final = None
        kept = await asyncio.to_thread(_kept, final, items)
        if self._memory.num_bytes + kept.num_bytes <= _KEPT_BYTES:
            self._latest = kept
            self._memory.num_bytes += kept.num_bytes

    def forget(self) -> None:
        """Drop the latest response. Idempotent."""
        if self._latest is not None:
            self._memory.num_bytes -= self._latest.num_bytes
            self._latest = None

    def parse(self, data: bytes) -> ResponsesBody:
        return parse_turn(data)

    async def complete(self, body: ResponsesBody, owner: str) -> ResponsesBody:
        previous = body.request.previous_response_id
        latest = self._latest
        if latest is not None and previous == latest.id:
            return await asyncio.to_thread(_continued, body, latest, self._max_bytes)
        if previous is not None and self._responses.store is None:
            text = f"no response {shown(previous)} is kept on this connection; send the whole conversation"
            raise RequestError(text, "previous_response_id", "previous_response_not_found")
        return await self._responses.complete(body, owner)

    async def prepare(self, body: ResponsesBody, model: ServedModel) -> Prepared:
        return await self._responses.prepare(body, model)

    def respond(
        self, body: ResponsesBody, prepared: Prepared, model: ServedModel, options: GenerationOptions
    ) -> OutputItemsResponse:
        response = self._responses.respond(body, prepared, model, options=options)
        items = body.items
        store = response.on_final

        def keep(final: ResponseObject) -> None:
            store(final)
            if final.status in ("completed", "incomplete"):
                self._final = final, items

        response.on_final = keep
        return response


def parse_turn(data: bytes) -> ResponsesBody:
    """Raises RequestError."""
    fields = parse_json(data)
    kind = fields.pop("type", None)
    if kind != "response.create":
        raise RequestError(f"a message has type {shown(kind)}; send 'response.create' and the fields of a body", "type")
    if fields.get("background") or fields.get("stream") is False:
        name = "background" if fields.get("background") else "stream"
        raise RequestError(f"{name} is a parameter of HTTP; leave it out, responses arrive as events", name)
    return responses_body({**fields, "stream": True}, keep_images=True)


def _kept(final: ResponseObject, before: list[Item]) -> _Kept:
    return _Kept(final.id, encode_items(before).followed_by(encode_output(final.output)))


def _continued(body: ResponsesBody, latest: _Kept, max_bytes: int) -> ResponsesBody:
    """Raises RequestError."""
    places = latest.items.places
    own = input_items(body.request.input)
    budget = ConversationBudget(max_bytes)
    budget.take(places, 0, len(places), field="previous_response_id")
    before = latest.items.decoded()
    by_id = {place.id: at for at, place in enumerate(places)}
    items = list(before)
    for item in own:
        at = by_id.get(reference_of(item) or "")
        if at is not None:
            budget.take(places, at, at + 1, field="input")
        items.append(item if at is None else before[at])
    return body.with_items(items)
