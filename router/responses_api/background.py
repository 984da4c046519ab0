"""Background responses: they run without their client. Their events, if streamed, are kept for later readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from pdserve.errors import PdserveError, RequestError
from pdserve.pb import pdserve_pb2 as pb
from router.dialect.answer_writer import AnswerWriter
from router.dialect.events import Event, batches, parts_of, server_sent
from router.dialect.idle_timer import IdleTimer
from router.dialect.json_pieces import json_chunks
from router.dialect.responses import BodyResponse, Response
from router.errors import ResponseNotStored, status_and_type
from router.gate.rate_limits import Headers
from router.generation.choice import Choice
from router.generation.job import Job
from router.responses_api.output_objects import ResponseObject
from router.responses_api.output_writers import OutputItemsResponse
from router.responses_api.request import ResponsesBody
from router.responses_api.response_store import ResponseStore
from router.text.chat.output_parsing import OutputParsing
from router.text.tokenizer import Tokenizer


class EventLog:
    """The events of a response, in order of their sequence numbers, for any number of readers."""

    def __init__(self) -> None:
        self.ended = False
        self.num_bytes = 0
        self._events: list[Event | Callable[[], Iterator[Event]]] = []
        self._more = asyncio.Event()  # replaced with each event

    def write(self, event: Event) -> None:
        self.num_bytes += len(event.data)
        self._add(event)

    def write_large(self, kind: str, make: Callable[[], Iterator[bytes]]) -> None:
        """Write an event that each reader encodes; it has no bytes yet."""
        self._add(lambda: parts_of(kind, make()))

    def end(self) -> None:
        self.ended = True
        self._wake()

    def events(self) -> Iterator[Event]:
        """All events. They do not change after the end, so another thread may encode them."""
        return chain.from_iterable(map(_parts, self._events))

    async def read(self, after: int, idle: float) -> AsyncIterator[list[Event]]:
        """Yield the events behind sequence number ``after``, in batches, until the end. Other tasks run in between.

        A batch is empty when there was none for ``idle`` seconds; 0: no batch is.
        """
        with IdleTimer(idle, self._wake) as timer:
            async for batch in self._read(after):
                if batch or timer.due:
                    yield batch
                    timer.sent()

    async def _read(self, after: int) -> AsyncIterator[list[Event]]:
        """Like ``read``, with an empty batch after each ``_wake`` without an event."""
        while True:
            more = self._more
            events = self._events[after + 1 :]
            after += len(events)
            for batch in batches(chain.from_iterable(map(_parts, events))):
                yield batch
                await asyncio.sleep(0)
            if more is self._more:
                if self.ended:
                    return
                await more.wait()
            if not events:
                yield []

    def _add(self, event: Event | Callable[[], Iterator[Event]]) -> None:
        self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


def _parts(event: Event | Callable[[], Iterator[Event]]) -> Iterator[Event]:
    return iter([event]) if isinstance(event, Event) else event()


RunningResponses = dict[tuple[str, str], "BackgroundItems"]  # by owner and id


class StoredPlace(NamedTuple):
    """The place of a background response: in the store, and among the running ones until its end."""

    store: ResponseStore
    owner: str
    running: RunningResponses


class BackgroundItems(OutputItemsResponse, BodyResponse):
    """A response that goes on when the client has left. ``log``: its events, if they are streamed."""

    def __init__(
        self,
        response: ResponseObject,
        jobs: Sequence[Job],
        body: ResponsesBody,
        parsing: OutputParsing,
        tokenizer: Tokenizer,
        place: StoredPlace,
    ) -> None:
        super().__init__(response, jobs, body, parsing=parsing, tokenizer=tokenizer)
        self._place = place
        self._items = body.items
        self.started = True  # the client knows it before the first token
        self.log = EventLog() if body.stream else None
        if self.log is not None:
            self._writer.stream = self.log
            self._write_start()

    async def deliver(self, writer: AnswerWriter, headers: Headers) -> str:
        """Send the response as it began, or its events, and wait for its end."""
        store, owner, running = self._place
        key = (owner, self.response.id)
        store.put(owner, self.response, self._items)
        self.on_final = self._finish
        if self.ended:  # no node took the request
            self.on_final(self.response)
        running[key] = self
        try:
            if not self.begun:
                await self._check_stored()
            if self.log is None:
                await writer.send_json(self.body(), headers, lambda: False)
            else:
                await self._begin(writer, headers)
                async for events in self.log.read(after=-1, idle=writer.keep_alive):
                    await (writer.send_events(events, last=False) if events else writer.send_sign_of_life(self.ping))
                await writer.send_events([], last=True)
            while not self.ended:
                self.wake.clear()
                await self.wake.wait()
        finally:
            del running[key]
        return "ok" if self.error is None else status_and_type(self.error)[1]

    async def keep_open(self, writer: AnswerWriter, headers: Headers) -> None:
        if self.log is not None:
            await Response.keep_open(self, writer, headers)

    async def _check_stored(self) -> None:
        """Raises RequestError if the response was not written: its client could never read it."""
        try:
            await self._place.store.response(self._place.owner, self.response.id)
        except ResponseNotStored as exc:
            raise RequestError(f"the background response cannot be stored: {exc}", "background") from exc

    def _finish(self, final: ResponseObject) -> None:
        events = () if self.log is None else map(server_sent, self.log.events())
        self._place.store.finish(self._place.owner, final, events)

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        super().on_delta(choice, text, output)
        if self.log is not None:
            self._held = max(self._held, self.log.num_bytes)
        self.hold(text, self._num_logprobs)

    def on_disconnect(self) -> None:
        """Go on."""

    def on_end(self, error: PdserveError | None) -> None:
        super().on_end(error)
        if self.log is not None:
            self.log.end()

    def cancel(self) -> None:
        """Cancel at the nodes; ``response`` has the output so far."""
        if self.ended:
            return
        self.generation.cancel()
        self._set_final(self._ended("cancelled"))
        Response.on_end(self, None)  # without a last event
        if self.log is not None:
            self.log.end()

    def body(self) -> Iterator[bytes]:
        return json_chunks(self.response)
