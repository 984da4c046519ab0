"""/v1/responses and /v1/responses/compact: like a chat, with earlier responses from the store, where new ones go.

A background response is answered when it has been admitted. It goes on until its end, with or without its client.
"""

from __future__ import annotations

import asyncio
from functools import partial
from uuid import uuid4

from pdserve.errors import RequestError
from router.completions_api.chat_dialect import prepare_chat
from router.completions_api.field_names import named_as
from router.completions_api.request_bodies import ChatBody
from router.dialect.dialect import GenerateDialect, Prepared
from router.dialect.operation import COMPUTES, Operation
from router.generation.job import GenerationOptions
from router.responses_api.background import BackgroundItems, RunningResponses, StoredPlace
from router.responses_api.input_items import input_items, reference_of
from router.responses_api.output_objects import CompactedResponse, ResponseObject
from router.responses_api.output_writers import (
    CompactedItems,
    FullOutputItems,
    OutputItemsResponse,
    StreamedOutputItems,
    new_response,
)
from router.responses_api.request import (
    CHAT_ONLY,
    FIELD_NAMES,
    CompactRequest,
    ResponsesBody,
    ResponsesRequest,
    parse_compact,
    parse_responses,
)
from router.responses_api.response_store import ResponseStore, find_conversation
from router.responses_api.stored_items import image_bytes
from router.service import ServedModel


class ResponsesDialect(GenerateDialect[ResponsesBody]):
    """``store`` None: responses are not stored. ``running``: background responses, until their end."""

    name = "responses"
    trace_name = "chat"
    paths = ("/v1/responses",)
    operation = Operation(
        summary="Create a response",
        response=ResponseObject,
        statuses=COMPUTES,
        body=ResponsesRequest,
        chat_fields=frozenset(ChatBody.__struct_fields__) - CHAT_ONLY,
        streams=True,
    )

    def __init__(self, store: ResponseStore | None, running: RunningResponses) -> None:
        self.store = store
        self._running = running

    def parse(self, data: bytes) -> ResponsesBody:
        return parse_responses(data, has_store=self.store is not None)

    async def complete(self, body: ResponsesBody, owner: str) -> ResponsesBody:
        return await _complete(body, owner, self.store)

    async def prepare(self, body: ResponsesBody, model: ServedModel) -> Prepared:
        if body.keep_images:
            model.images.memory.hold(image_bytes(body.items), body)
        with named_as(FIELD_NAMES):
            return await prepare_chat(body, model, always_parsed=True)

    def respond(
        self, body: ResponsesBody, prepared: Prepared, model: ServedModel, options: GenerationOptions
    ) -> OutputItemsResponse:
        assert prepared.parsing is not None
        owner = options.owner
        store = self.store if body.request.store else None
        # Stored responses have ids of their own, as a client may choose the id of its request.
        response_id = f"resp_{options.request_id if store is None else uuid4().hex}"
        jobs = prepared.jobs
        parsing = prepared.parsing
        tokenizer = model.tokenizer
        stored = store is not None
        warnings = parsing.warnings
        sampling = jobs[0].sampling
        started = new_response(body, model.name, response_id, sampling=sampling, stored=stored, warnings=warnings)
        if body.request.background:
            assert store is not None, "complete() has refused the body otherwise"
            place = StoredPlace(store, owner, self._running)
            return BackgroundItems(started, jobs, body, parsing=parsing, tokenizer=tokenizer, place=place)
        kind = StreamedOutputItems if body.stream else FullOutputItems
        response = kind(started, jobs, body, parsing=parsing, tokenizer=tokenizer)
        if store is not None:
            response.on_final = lambda final: store.put(owner, final, body.items)
        return response


class CompactDialect(GenerateDialect[ResponsesBody]):
    name = "responses"
    trace_name = "chat"
    paths = ("/v1/responses/compact",)
    operation = Operation(
        summary="Replace a conversation by a summary",
        response=CompactedResponse,
        statuses=COMPUTES,
        body=CompactRequest,
    )

    def __init__(self, store: ResponseStore | None) -> None:
        self._store = store

    def parse(self, data: bytes) -> ResponsesBody:
        return parse_compact(data)

    async def complete(self, body: ResponsesBody, owner: str) -> ResponsesBody:
        return await _complete(body, owner, self._store)

    async def prepare(self, body: ResponsesBody, model: ServedModel) -> Prepared:
        with named_as(FIELD_NAMES):
            return await prepare_chat(body, model, always_parsed=True)

    def respond(
        self, body: ResponsesBody, prepared: Prepared, model: ServedModel, options: GenerationOptions
    ) -> CompactedItems:
        assert prepared.parsing is not None
        jobs = prepared.jobs
        response_id = f"resp_{options.request_id}"
        started = new_response(body, model.name, response_id, sampling=jobs[0].sampling, stored=False)
        return CompactedItems(started, jobs, body, parsing=prepared.parsing, tokenizer=model.tokenizer)


async def _complete(body: ResponsesBody, owner: str, store: ResponseStore | None) -> ResponsesBody:
    """Return the body with the items that it names. Raises RequestError."""
    if not body.request.needs_store and not body.request.background:
        return body
    if store is None:
        raise _needs_store(body)
    return await _with_stored_items(body, owner, store) if body.request.needs_store else body


def _needs_store(body: ResponsesBody) -> RequestError:
    request = body.request
    needing = {"previous_response_id": request.previous_response_id is not None, "background": request.background}
    name = next((name for name, given in needing.items() if given), "input")
    remedy = "send the whole conversation as input, or start the router with --response-store"
    return RequestError(f"{name} needs stored responses, which are not stored here; {remedy}", name)


async def _with_stored_items(body: ResponsesBody, owner: str, store: ResponseStore) -> ResponsesBody:
    own = input_items(body.request.input)
    references = [name for item in own if (name := reference_of(item)) is not None]
    previous_id = body.request.previous_response_id
    before, stored = await store.run(
        partial(find_conversation, owner=owner, previous_id=previous_id, references=references)
    )
    items = [*before, *(stored.get(str(item.get("id")), item) if reference_of(item) else item for item in own)]
    return await asyncio.to_thread(body.with_items, items)
