"""/v1/responses: like a chat, with earlier responses read from the store and this one written to it.

A background response is answered when it has been admitted. It goes on here until its end, with or without its client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from uuid import uuid4

from starlette.types import Send

from pdserve.errors import RequestError
from router.completions_api.generate_body import GenerateBody
from router.completions_api.response_writers import Response
from router.errors import ResponseNotStored, status_and_type
from router.gate.admission import RequestAdmission
from router.gate.rate_limits import Headers
from router.generation.job import GenerationOptions, Job
from router.http.body_reader import BodyReader
from router.http.delivery import STREAM_HEADERS, delivery, send_pieces
from router.http.generate_endpoint import GenerateEndpoint
from router.http.request_accounting import RequestAccounting
from router.responses_api.background import BackgroundItems, EventLog
from router.responses_api.input_items import input_items, reference_of
from router.responses_api.output_objects import ResponseObject
from router.responses_api.output_writers import (
    CompactedItems,
    FullOutputItems,
    OutputItemsResponse,
    StreamedOutputItems,
    new_response,
)
from router.responses_api.request import ResponsesBody, parse_compact, parse_responses
from router.responses_api.response_store import ResponseStore, find_conversation
from router.service import ServedModel, Service
from router.text.chat.output_parsing import OutputParsing

RunningResponses = dict[tuple[str, str], BackgroundItems]  # by owner and id


class ResponsesEndpoint(GenerateEndpoint):
    """``store`` None: responses are not stored. ``running``: background responses, until their end."""

    def __init__(
        self, service: Service, bodies: BodyReader, store: ResponseStore | None, running: RunningResponses
    ) -> None:
        super().__init__(service, bodies, "responses", parse_responses)
        self._store = store
        self._running = running

    async def _respond(
        self,
        body: GenerateBody,
        send: Send,
        admission: RequestAdmission,
        accounting: RequestAccounting,
        disconnected: asyncio.Future[None],
    ) -> str:
        assert isinstance(body, ResponsesBody)
        if body.request.needs_store or body.request.background:
            body = await self._with_named_items(body, admission.owner)
        return await super()._respond(body, send, admission, accounting, disconnected)

    async def _with_named_items(self, body: ResponsesBody, owner: str) -> ResponsesBody:
        """Return the body with the items that it names. Raises RequestError."""
        if self._store is None:
            raise _needs_store(body)
        return await _with_stored_items(body, owner, self._store) if body.request.needs_store else body

    def _make_response(
        self,
        model: ServedModel,
        body: GenerateBody,
        jobs: Sequence[Job],
        parsing: OutputParsing | None,
        options: GenerationOptions,
    ) -> OutputItemsResponse:
        assert isinstance(body, ResponsesBody)
        assert parsing is not None
        store = self._store if body.request.store else None
        # A client may choose the id of its request, so that does not name what is stored.
        response_id = f"resp_{options.request_id if store is None else uuid4().hex}"
        started = new_response(body, model.name, response_id, jobs[0].sampling, store is not None)
        arguments = (started, jobs, body, parsing, model.tokenizer)
        if body.request.background:
            return BackgroundItems(*arguments)
        response = StreamedOutputItems(*arguments) if body.stream else FullOutputItems(*arguments)
        if store is not None:
            response.on_final = lambda final: store.put(options.owner, final, body.items)
        return response

    async def _deliver(self, send: Send, response: Response, options: GenerationOptions, headers: Headers) -> str:
        if not isinstance(response, BackgroundItems):
            return await super()._deliver(send, response, options, headers)
        store = self._store
        assert store is not None
        key = (options.owner, response.response.id)
        store.put(options.owner, response.response, response.items)
        response.on_final = partial(_finish, store, options.owner, response)
        if response.ended:  # no node took it
            response.on_final(response.response)
        self._running[key] = response
        try:
            await _check_stored(store, *key)
            async with delivery(options.remaining, options.request_id, options.log_fields):
                if response.log is None:
                    await send_pieces(send, response.body(), headers, self._service.turns, lambda: False)
                else:
                    await _send_events(send, response.log, headers)
            while not response.ended:
                response.wake.clear()
                await response.wake.wait()
        finally:
            del self._running[key]
        return "ok" if response.error is None else status_and_type(response.error)[1]


class CompactEndpoint(ResponsesEndpoint):
    """/v1/responses/compact."""

    def __init__(self, service: Service, bodies: BodyReader, store: ResponseStore | None) -> None:
        super().__init__(service, bodies, store, {})
        self._parse = parse_compact

    def _make_response(
        self,
        model: ServedModel,
        body: GenerateBody,
        jobs: Sequence[Job],
        parsing: OutputParsing | None,
        options: GenerationOptions,
    ) -> OutputItemsResponse:
        assert isinstance(body, ResponsesBody)
        assert parsing is not None
        started = new_response(body, model.name, f"resp_{options.request_id}", jobs[0].sampling, False)
        return CompactedItems(started, jobs, body, parsing, model.tokenizer)


def _finish(store: ResponseStore, owner: str, response: BackgroundItems, final: ResponseObject) -> None:
    store.finish(owner, final, () if response.log is None else response.log.pieces())


async def _check_stored(store: ResponseStore, owner: str, response_id: str) -> None:
    """Raises RequestError if a background response was not written: its client could never read it."""
    try:
        await store.response(owner, response_id)
    except ResponseNotStored as exc:
        raise RequestError(f"the background response cannot be stored: {exc}", "background") from exc


async def _send_events(send: Send, log: EventLog, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, *headers]})
    async for chunk in log.read(after=-1):
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _needs_store(body: ResponsesBody) -> RequestError:
    request = body.request
    needing = {"previous_response_id": request.previous_response_id is not None, "background": request.background}
    name = next((name for name, given in needing.items() if given), "input")
    remedy = "send the whole conversation as input, or start the router with --response-store"
    return RequestError(f"{name} needs stored responses, which are not stored here; {remedy}", name)


async def _with_stored_items(body: ResponsesBody, owner: str, store: ResponseStore) -> ResponsesBody:
    """Return the body with the items that it names. Raises RequestError."""
    own = input_items(body.request.input)
    references = [name for item in own if (name := reference_of(item)) is not None]
    previous_id = body.request.previous_response_id
    before, found = await store.run(
        partial(find_conversation, owner=owner, previous_id=previous_id, references=references)
    )
    items = [*before, *(found.get(str(item.get("id")), item) if reference_of(item) else item for item in own)]
    return await asyncio.to_thread(body.with_items, items)
