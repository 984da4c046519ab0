"""Stored responses: a bounded SQLite database, in memory or in a file. One thread reads and writes it, in order.

Each entry belongs to an owner (Client.owner); other owners do not see it. It holds a response, the whole conversation
before it and, of a streamed background response, the events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from pdserve.errors import RequestError, shown
from router.dialect.json_pieces import json_pieces
from router.errors import ResponseNotStored, StoreFailed
from router.metrics import RouterMetrics
from router.responses_api.input_items import Item
from router.responses_api.output_objects import ResponseObject
from router.responses_api.response_database import Entry, ItemIndex, ResponseDatabase, StoreError, StoreLimits
from router.responses_api.stored_items import ConversationBudget, encode_items, encode_output

logger = logging.getLogger(__name__)

_MAX_UNWRITTEN = 256  # entries waiting for a disk that may hang
_EXPIRY_SECONDS = 60.0  # seconds between searches for expired entries

Result = TypeVar("Result")


class ResponseStore:
    """``close`` waits until everything is written."""

    def __init__(self, path: str, limits: StoreLimits, metrics: RouterMetrics) -> None:
        """``path``: of a file, or ":memory:". Raises ConfigError if the file cannot be used."""
        self._limits = limits
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="response store")
        self._database = self._thread.submit(ResponseDatabase, path, limits).result()
        self._unwritten = 0
        self._errors = metrics.store_errors
        self._expiry: asyncio.Task[None] | None = None
        metrics.stored_responses.set_function(lambda: self._database.num_entries)
        metrics.stored_bytes.set_function(lambda: self._database.num_bytes)

    def start(self) -> None:
        self._expiry = asyncio.create_task(self._expire(), name="response store")

    async def close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._thread.submit(self._database.close)
        await asyncio.to_thread(self._thread.shutdown)

    def put(self, owner: str, response: ResponseObject, items: Sequence[Item]) -> None:
        """Store a response soon, in place of an earlier state; later calls see it. Neither may change any more."""
        if self._unwritten < _MAX_UNWRITTEN:
            self._write(response.id, lambda: self._database.put(_entry(owner, response, items)))
        else:
            self._not_written(response.id, f"{self._unwritten} others are not written yet")

    def finish(self, owner: str, response: ResponseObject, events: Iterable[bytes]) -> None:
        """Replace the state of a response that is still stored, and add its events. Too large a response fails."""

        def write() -> None:
            self._database.finish(
                owner,
                response.id,
                response.status,
                response=b"".join(json_pieces(response)),
                output=encode_output(response.output),
                events=b"".join(events),
            )

        self._write(response.id, write)

    async def response(self, owner: str, response_id: str) -> bytes:
        """Return the JSON of a response. Raises ResponseNotStored."""
        return await self._column("response", owner, response_id)

    async def events(self, owner: str, response_id: str) -> bytes:
        """Return the events of a streamed background response; empty for others. Raises ResponseNotStored."""
        return await self._column("events", owner, response_id)

    async def is_background(self, owner: str, response_id: str) -> bool:
        return await self._run(self._database.is_background, owner, response_id)

    async def delete(self, owner: str, response_id: str) -> None:
        """Raises ResponseNotStored."""
        if not await self._run(self._database.delete, owner, response_id):
            raise self.not_stored(response_id)

    async def run(self, read: Callable[[ResponseDatabase], Result]) -> Result:
        return await self._run(read, self._database)

    def not_stored(self, response_id: str) -> ResponseNotStored:
        text = f"no response {shown(response_id)} of this API key is stored; {self._limits}"
        return ResponseNotStored(text, "response_id", "response_not_found")

    async def _column(self, column: str, owner: str, response_id: str) -> bytes:
        value = await self._run(self._database.read, column, owner, response_id)
        if value is None:
            raise self.not_stored(response_id)
        return value

    async def _run(self, call: Callable[..., Result], *args: Any) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, partial(call, *args))
        except StoreError as exc:
            self._errors.inc()
            logger.error("the response store cannot be read: %s", exc)
            raise StoreFailed("the response store cannot be read; see the router's log") from exc

    def _write(self, response_id: str, write: Callable[[], None]) -> None:
        self._unwritten += 1
        loop = asyncio.get_running_loop()
        written = self._thread.submit(write)
        written.add_done_callback(lambda done: loop.call_soon_threadsafe(self._written, response_id, done))

    def _written(self, response_id: str, done: Future[None]) -> None:
        self._unwritten -= 1
        if (error := done.exception()) is not None:
            self._not_written(response_id, error)

    def _not_written(self, response_id: str, reason: object) -> None:
        self._errors.inc()
        logger.error("response %s is not stored: %s", response_id, reason)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_SECONDS)
            try:
                await self._run(self._database.expire)
            except StoreFailed:  # already logged
                continue


def _entry(owner: str, response: ResponseObject, items: Sequence[Item]) -> Entry:
    return Entry(
        owner=owner,
        id=response.id,
        status=response.status,
        background=response.background,
        response=b"".join(json_pieces(response)),
        num_inputs=len(items),
        items=encode_items(items).followed_by(encode_output(response.output)),
    )


def find_conversation(
    database: ResponseDatabase, owner: str, previous_id: str | None, references: Sequence[str]
) -> tuple[list[Item], dict[str, Item]]:
    """Return the items up to the end of the previous response, and items by id, with all references.

    Raises RequestError for an id that is not stored, and for more items than a request may name.
    """
    items: list[Item] = []
    budget = ConversationBudget(database.limits.max_conversation)
    if previous_id is not None:
        index = database.index(owner, previous_id)
        if index is None:
            text = f"no response {shown(previous_id)} of this API key is stored; {database.limits}"
            raise RequestError(text, "previous_response_id", "previous_response_not_found")
        if index.status == "in_progress":
            text = f"the response {shown(previous_id)} is still in progress; wait for its end"
            raise RequestError(text, "previous_response_id")
        budget.take(index.places, 0, len(index.places), field="previous_response_id")
        items += database.read_items(index, 0, len(index.places))
    return items, _find_items(database, owner, references, budget=budget)


def _find_items(
    database: ResponseDatabase, owner: str, references: Sequence[str], budget: ConversationBudget
) -> dict[str, Item]:
    items: dict[str, Item] = {}
    responses: dict[str, tuple[ItemIndex, dict[str, int]]] = {}  # response id → index, and positions of items by id
    response_of: dict[str, str] = {}  # item id → response id
    for name in references:
        if name not in response_of:
            response_of[name] = database.response_of(owner, name) or ""
        response_id = response_of[name]
        if response_id not in responses and (index := database.index(owner, response_id)) is not None:
            responses[response_id] = index, {place.id: at for at, place in enumerate(index.places)}
        if response_id not in responses:
            text = f"no item {shown(name)} of this API key is stored; send the item itself. {database.limits}"
            raise RequestError(text, "input", "item_not_found")
        index, positions = responses[response_id]
        at = positions[name]
        budget.take(index.places, at, at + 1, field="input")
        if name not in items:
            (items[name],) = database.read_items(index, at, at + 1)
    return items
