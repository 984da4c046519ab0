"""Background responses: they run without their client. Their events, if streamed, are kept for later readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import chain

from pdserve.errors import PdserveError
from pdserve.pb import pdserve_pb2 as pb
from router.completions_api.json_pieces import in_chunks, json_chunks
from router.completions_api.response_writers import BodyResponse, Response
from router.generation.choice import Choice
from router.generation.job import Job
from router.responses_api.output_objects import ResponseObject
from router.responses_api.output_writers import OutputItemsResponse
from router.responses_api.request import ResponsesBody
from router.text.chat.output_parsing import OutputParsing
from router.text.tokenizer import Tokenizer


class EventLog:
    """The events of a response, in order of their sequence numbers, for any number of readers."""

    def __init__(self) -> None:
        self.ended = False
        self.num_bytes = 0
        self._events: list[bytes | Callable[[], Iterator[bytes]]] = []
        self._more = asyncio.Event()  # replaced with each event

    def write(self, chunk: bytes) -> None:
        self.num_bytes += len(chunk)
        self._add(chunk)

    def write_large(self, make: Callable[[], Iterator[bytes]]) -> None:
        """Write an event that each reader encodes; it has no bytes yet."""
        self._add(make)

    def end(self) -> None:
        self.ended = True
        self._wake()

    def pieces(self) -> Iterator[bytes]:
        """All events. They do not change after the end, so another thread may encode them."""
        for event in self._events:
            yield from _pieces(event)

    async def read(self, after: int) -> AsyncIterator[bytes]:
        """Yield the events behind sequence number ``after``, in chunks, until the end. Other tasks run in between."""
        while True:
            more, events = self._more, self._events[after + 1 :]
            after += len(events)
            for chunk in in_chunks(chain.from_iterable(map(_pieces, events))):
                yield chunk
                await asyncio.sleep(0)
            if more is self._more:
                if self.ended:
                    return
                await more.wait()

    def _add(self, event: bytes | Callable[[], Iterator[bytes]]) -> None:
        self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


def _pieces(event: bytes | Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
    return iter([event]) if isinstance(event, bytes) else event()


class BackgroundItems(OutputItemsResponse, BodyResponse):
    """A response that goes on when the client has left. ``log``: its events, if they are streamed."""

    def __init__(
        self,
        response: ResponseObject,
        jobs: Sequence[Job],
        body: ResponsesBody,
        parsing: OutputParsing,
        tokenizer: Tokenizer,
    ) -> None:
        super().__init__(response, jobs, body, parsing, tokenizer)
        self.items = body.items
        self.started = True  # the client knows it before the first token
        self.log = EventLog() if body.stream else None
        if self.log is not None:
            self._writer.stream = self.log
            self._write_start()

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
