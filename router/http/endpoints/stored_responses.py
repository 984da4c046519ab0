"""Stored responses: GET and DELETE /v1/responses/{id}, its input items, and the end of a background response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Literal, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from pdserve.errors import RequestError, cut, shown
from router.dialect.events import Event, server_sent
from router.errors import ResponseNotStored
from router.http.authentication import client_of
from router.http.endpoints.delivery import COMMENT, STREAM_HEADERS
from router.responses_api.background import RunningResponses
from router.responses_api.output_objects import DeletedResponse, InputItemList
from router.responses_api.response_database import ResponseDatabase
from router.responses_api.response_store import ResponseStore

_CHUNK_BYTES = 64 * 1024


class RetrieveQuery(msgspec.Struct, frozen=True):
    stream: bool = False
    starting_after: int = -1  # sequence number of the last event that the client has


class ItemsQuery(msgspec.Struct, frozen=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str = ""  # id of the last item that the client has


Query = TypeVar("Query", RetrieveQuery, ItemsQuery)


def add_stored_responses(
    app: FastAPI, store: ResponseStore | None, running: RunningResponses, keep_alive: float
) -> None:
    """``running``: background responses, until their end. ``keep_alive``: seconds between comments in a stream."""

    def opened(name: str) -> ResponseStore:
        if store is None:
            raise ResponseNotStored(f"no response {shown(name)}: responses are not stored", "response_id")
        return store

    @app.get("/v1/responses/{name}")
    async def retrieve(name: str, request: Request) -> Response:
        query = _query(request, RetrieveQuery)
        owner = client_of(request.scope).owner
        data = await opened(name).response(owner, name)
        if not query.stream:
            return _json(data)
        going = running.get((owner, name))
        if going is not None and going.log is not None:
            return _event_stream(_server_sent(going.log.read(query.starting_after, keep_alive)))
        events = b"" if going is not None else await opened(name).events(owner, name)
        if not events:
            text = f"response {shown(name)} has no events: it was not created with background and stream"
            raise RequestError(text, "stream")
        return _event_stream(_chunks(await asyncio.to_thread(_events_after, events, query.starting_after)))

    @app.delete("/v1/responses/{name}")
    async def delete(name: str, request: Request) -> Response:
        owner = client_of(request.scope).owner
        if going := running.get((owner, name)):
            going.cancel()
        await opened(name).delete(owner, name)
        return _json(msgspec.json.encode(DeletedResponse(name, True)))

    @app.post("/v1/responses/{name}/cancel")
    async def cancel(name: str, request: Request) -> Response:
        owner = client_of(request.scope).owner
        if going := running.get((owner, name)):
            going.cancel()
        data = await opened(name).response(owner, name)
        if not await opened(name).is_background(owner, name):
            text = f"response {shown(name)} cannot be cancelled: it was created without background"
            raise RequestError(text, "response_id")
        return _json(data)

    @app.get("/v1/responses/{name}/input_items")
    async def input_items(name: str, request: Request) -> Response:
        query = _query(request, ItemsQuery)
        owner = client_of(request.scope).owner
        store = opened(name)
        page = await store.run(partial(_page, owner=owner, response_id=name, query=query))
        if page is None:
            raise store.not_stored(name)
        return _json(page)


def _query(request: Request, kind: type[Query]) -> Query:
    """Raises RequestError. Other parameters have no effect."""
    try:
        return msgspec.convert(dict(request.query_params), kind, strict=False)
    except msgspec.ValidationError as exc:
        raise RequestError(f"the query is not valid: {cut(str(exc))}", "query") from exc


def _page(database: ResponseDatabase, owner: str, response_id: str, query: ItemsQuery) -> bytes | None:
    """Return the JSON of a page; None if there is no such response. Raises RequestError."""
    index = database.index(owner, response_id)
    if index is None:
        return None
    ids = [place.id for place in index.places[: index.num_inputs]]
    if query.after and query.after not in ids:
        raise RequestError(f"after names {shown(query.after)}, which is not an item of this response", "after")
    if query.order == "asc":
        first = ids.index(query.after) + 1 if query.after else 0
        positions = range(first, min(first + query.limit, len(ids)))
        has_more = positions.stop < len(ids)
    else:
        end = len(ids) - 1 - ids[::-1].index(query.after) if query.after else len(ids)
        positions = range(end - 1, max(end - query.limit, 0) - 1, -1)
        has_more = end > query.limit
    items = [item for at in positions for item in database.read_items(index, at, at + 1)]
    first_id, last_id = (ids[positions[0]], ids[positions[-1]]) if positions else ("", "")
    page = InputItemList(data=items, first_id=first_id, last_id=last_id, has_more=has_more)
    return msgspec.json.encode(page)


def _events_after(events: bytes, number: int) -> bytes:
    """Return the events behind sequence number ``number``; the first one has number 0."""
    position = 0
    for _ in range(number + 1):
        end = events.find(b"\n\n", position)
        if end < 0:
            return b""
        position = end + 2
    return events[position:]


async def _server_sent(batches: AsyncIterator[list[Event]]) -> AsyncIterator[bytes]:
    async for events in batches:
        yield b"".join(map(server_sent, events)) or COMMENT


def _event_stream(chunks: AsyncIterator[bytes]) -> Response:
    headers = {name.decode(): value.decode() for name, value in STREAM_HEADERS}
    return StreamingResponse(chunks, headers=headers)


def _json(data: bytes) -> Response:
    if len(data) <= _CHUNK_BYTES:
        return Response(data, media_type="application/json")
    return StreamingResponse(_chunks(data), media_type="application/json")


async def _chunks(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]
        await asyncio.sleep(0)  # other tasks run in between
