"""From output deltas to an answer: one JSON body, or a stream of events. Bases of the responses of all protocols."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from pdserve.errors import PdserveError, RequestError
from pdserve.pb import pdserve_pb2 as pb
from router.dialect.answer_writer import AnswerWriter
from router.dialect.events import Event, parts_of
from router.dialect.idle_timer import IdleTimer
from router.dialect.node_headers import node_headers
from router.dialect.wake import Wake
from router.errors import ClientDisconnected, status_and_type
from router.gate.rate_limits import Headers
from router.generation.choice import Choice
from router.generation.generation import RequestGeneration
from router.generation.job import Job

MAX_HELD = 64 * 1024 * 1024  # bytes of text, token ids and log-probabilities of a response that is not streamed
_TOKEN_BYTES = 20  # memory in columns per token
_ALTERNATIVE_BYTES = 8  # memory in columns per alternative
PAUSE_BYTES = 64 * 1024  # events that wait for the connection; above, the nodes pause the request
_RESUME_BYTES = 16 * 1024  # bytes left to write when the connection takes bytes again
_EVENT_BYTES = 96  # memory of an event beside its JSON: two objects and a list entry


class Response(ABC):
    """Base of all responses: the consumer of a generation. ``wake`` is set on every change."""

    ping: ClassVar[Event | None] = None  # the sign of life of a stream; None: a comment
    generation: RequestGeneration  # set before the first output arrives

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.wake = Wake()
        self.begun = False  # the status line of a stream is sent
        self.started = False  # from here on an error is part of the answer; see ``_start``
        self.ended = False
        self.disconnected = False
        self.error: PdserveError | None = None

    @property
    def num_choices(self) -> int:
        return sum(job.sampling.n for job in self.jobs)

    @abstractmethod
    async def deliver(self, writer: AnswerWriter, headers: Headers) -> str:
        """Send the answer as it comes, and return the outcome.

        Raises PdserveError before the first byte, and ClientDisconnected.
        """

    async def keep_open(self, writer: AnswerWriter, headers: Headers) -> None:
        """Show the client of a stream that its request is alive: send the status line, and a sign of life."""
        self.started = True
        await self._begin(writer, headers)
        await writer.send_sign_of_life(self.ping)

    @abstractmethod
    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        """See Consumer."""

    def on_weights(self, weights: str) -> None:
        """See Consumer."""
        self.weights = weights  # most protocols have no field for it

    def on_end(self, error: PdserveError | None) -> None:
        self.ended = True
        self.started = self.started or error is None
        self.error = error
        self.wake.set()

    def on_disconnect(self) -> None:
        """The client has disconnected: cancel the request at its nodes."""
        self.disconnected = True
        self.generation.cancel()
        self.wake.set()

    def _start(self) -> None:
        """Start the answer: on a token, an end without error, or a sign of life."""
        self.started = True
        self.wake.set()

    async def _begin(self, writer: AnswerWriter, headers: Headers) -> None:
        """Send the status line of a stream, once. Ids of nodes are known after the first token only."""
        if not self.begun:
            self.begun = True
            await writer.begin_events([*headers, *node_headers(self.generation)])


class BodyResponse(Response):
    """A response that is sent after its end."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        super().__init__(jobs)
        self._held = 0  # bytes

    async def keep_open(self, writer: AnswerWriter, headers: Headers) -> None:
        """Send nothing: there is no answer yet."""

    @abstractmethod
    def body(self) -> Iterator[bytes]:
        """The JSON body in pieces. Call it after the end without an error."""

    async def deliver(self, writer: AnswerWriter, headers: Headers) -> str:
        while not self.ended and not self.disconnected:
            self.wake.clear()
            await self.wake.wait()
        if self.error is not None:
            raise self.error
        if self.disconnected:
            raise ClientDisconnected
        await writer.send_json(self.body(), [*headers, *node_headers(self.generation)], lambda: self.disconnected)
        return "ok"

    def hold(self, text: str, num_logprobs: int) -> None:
        """Count a token, and end the request beyond MAX_HELD."""
        self._held += len(text) + _TOKEN_BYTES + _ALTERNATIVE_BYTES * num_logprobs
        if self._held > MAX_HELD:
            remedy = "stream it, or lower n, max_tokens or the number of log-probabilities"
            self.generation.fail(RequestError(f"the response takes more than {MAX_HELD} bytes of memory; {remedy}"))


class EventStreamResponse(Response):
    """Events in a buffer, which the connection drains. While it does not, the nodes pause the request.

    Large events are encoded part by part, as the client reads them. The status line waits for the first token or the
    first sign of life, so that an earlier failure has a status.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        super().__init__(jobs)
        self._ready: list[Event] = []  # events before the first large one
        self._later: deque[Event | Iterator[Event]] = deque()  # parts of a large event, and all later events
        self._buffered = 0  # bytes
        self._sending = False  # the connection has not taken the events of the last ``_take``
        self._paused = False

    def write(self, event: Event) -> None:
        self._append(event)
        self.wake.set()
        if self._sending and self._buffered > PAUSE_BYTES and not self._paused:
            self._paused = True
            self.generation.set_paused(True)

    def write_large(self, kind: str, make: Callable[[], Iterator[bytes]]) -> None:
        """Write an event of any size. It does not count as buffered: it does not exist yet."""
        self._later.append(parts_of(kind, make()))
        self.wake.set()

    async def deliver(self, writer: AnswerWriter, headers: Headers) -> str:
        with IdleTimer(writer.keep_alive, self.wake.set) as timer:
            return await self._deliver(writer, headers, timer)

    async def _deliver(self, writer: AnswerWriter, headers: Headers, timer: IdleTimer) -> str:
        await self.wake.wait()
        if self.error is not None and not self.started:
            raise self.error
        if self.started:
            await self._begin(writer, headers)
        while not self.disconnected:
            events = self._take()
            has_more = bool(self._ready or self._later)
            last = self.ended and not has_more
            if events or last:
                await writer.send_events(events, last)
                timer.sent()
            elif timer.due:
                await self.keep_open(writer, headers)
                timer.sent()
            self._sending = False
            if self._paused and self._buffered <= _RESUME_BYTES:
                self._paused = False
                self.generation.set_paused(False)
            if last:
                return "ok" if self.error is None else status_and_type(self.error)[1]
            if has_more:
                await writer.turn()
            else:
                await self.wake.wait()
        raise ClientDisconnected

    def _append(self, event: Event) -> None:
        if self._later:
            self._later.append(event)
        else:
            self._ready.append(event)
        self._buffered += len(event.data) + _EVENT_BYTES

    def _take(self) -> list[Event]:
        """Return the events before the next large one, and a part of that, and remove them."""
        self.wake.clear()
        self._sending = True
        events = self._ready
        self._ready = []
        if self._later:
            events.append(self._next_part())
        else:
            self._buffered = 0
        return events

    def _next_part(self) -> Event:
        """Remove and return a part of the large event in front; after its last one, what follows it is ready."""
        parts = self._later[0]
        assert not isinstance(parts, Event)
        part = next(parts)
        if part.ends:
            self._later.popleft()
            while self._later and isinstance(event := self._later[0], Event):
                self._ready.append(event)
                self._later.popleft()
        return part
