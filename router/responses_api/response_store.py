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

import msgspec

from pdserve.errors import RequestError, shown
from router.completions_api.json_pieces import json_pieces
from router.errors import ResponseNotStored, StoreFailed
from router.metrics import RouterMetrics
from router.responses_api.input_items import Item, stored_item
from router.responses_api.output_objects import ResponseObject
from router.responses_api.response_database import Entry, ResponseDatabase, StoreError, StoreLimits

logger = logging.getLogger(__name__)

_MAX_UNWRITTEN = 256  # entries; a disk may hang
_EXPIRY_SECONDS = 60.0  # between searches for entries that are too old

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
        """Replace the state of a response that is still stored, and add its events. What is too large has failed."""

        def write() -> None:
            data = b"".join(json_pieces(response))
            self._database.finish(owner, response.id, data, [item.id for item in response.output], b"".join(events))

        self._write(response.id, write)

    async def response(self, owner: str, response_id: str) -> bytes:
        """Return the JSON of a response. Raises ResponseNotStored."""
        return await self._column("response", owner, response_id)

    async def events(self, owner: str, response_id: str) -> bytes:
        """Return the events of a streamed background response; empty for others. Raises ResponseNotStored."""
        return await self._column("events", owner, response_id)

    async def input_items(self, owner: str, response_id: str) -> bytes:
        """Return the JSON of the conversation before a response. Raises ResponseNotStored."""
        return await self._column("input", owner, response_id)

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
        found = await self._run(self._database.read, column, owner, response_id)
        if found is None:
            raise self.not_stored(response_id)
        return found

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
            except StoreFailed:  # logged
                continue


def _entry(owner: str, response: ResponseObject, items: Sequence[Item]) -> Entry:
    with_ids = [stored_item(item) for item in items]
    return Entry(
        owner=owner,
        id=response.id,
        response=b"".join(json_pieces(response)),
        input=b"[" + b",".join(map(msgspec.json.encode, with_ids)) + b"]",
        item_ids=[*(item["id"] for item in with_ids), *(item.id for item in response.output)],
    )


def find_conversation(
    database: ResponseDatabase, owner: str, previous_id: str | None, references: Sequence[str]
) -> tuple[list[Item], dict[str, Item]]:
    """Return the items up to the end of the previous response, and items by id, with all references.

    Raises RequestError for what is not stored.
    """
    items: list[Item] = []
    if previous_id is not None:
        found = _stored(database, owner, previous_id)
        if found is None:
            text = f"no response {shown(previous_id)} of this API key is stored; {database.limits}"
            raise RequestError(text, "previous_response_id", "previous_response_not_found")
        status, items = found
        if status == "in_progress":
            text = f"the response {shown(previous_id)} is still in progress; wait for its end"
            raise RequestError(text, "previous_response_id")
    by_id: dict[str, Item] = {}
    for name in references:
        if name not in by_id and (response_id := database.response_of(owner, name)) is not None:
            _, others = _stored(database, owner, response_id) or ("", [])
            by_id |= {item["id"]: item for item in others}
        if name not in by_id:
            text = f"no item {shown(name)} of this API key is stored; send the item itself. {database.limits}"
            raise RequestError(text, "input", "item_not_found")
    return items, by_id


def _stored(database: ResponseDatabase, owner: str, response_id: str) -> tuple[str, list[Item]] | None:
    """Return the status of a response, and its conversation with its output."""
    response, before = (database.read(column, owner, response_id) for column in ("response", "input"))
    if response is None or before is None:
        return None
    decoded = msgspec.json.decode(response)
    return decoded["status"], [*msgspec.json.decode(before), *decoded["output"]]
