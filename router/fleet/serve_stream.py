"""The long-lived gRPC stream to one decode node; all requests of this router to that node share it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from operator import itemgetter
from typing import Protocol

import grpc.aio

from pdserve.errors import Draining, NodeError, Overloaded, PdserveError, RequestError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb.pdserve_pb2_grpc import DecodeNodeStub
from pdserve.rpc.errors import failure_from_pb, rpc_reason
from pdserve.rpc.message_limits import MAX_ENTRIES, RESUME_LIMIT
from router.fleet.policy import NodeChoice

logger = logging.getLogger(__name__)

MAX_UNSENT = 64 << 20  # bytes that may wait for the node to read; at half of it the stream takes new requests again
_OUTPUTS_AT_ONCE = 64  # about five milliseconds with log-probabilities
_SORTED_BYTES = 8192  # of a batch; its outputs take a few milliseconds: 40 with log-probabilities, 700 without
_MESSAGE_BYTES = 256  # a queued message takes at least so much memory


class NodeLost(NodeError):
    """The node is dead, hung or restarted: its stream has ended."""


class OutputHandler(Protocol):
    """Handles the outputs of one request. Called on the event loop; must neither block nor raise."""

    def on_output(self, output: pb.Output) -> None:
        """Handle a token of a choice, the end of a choice, or both."""

    def on_failure(self, error: PdserveError) -> None:
        """Handle the end of the request with all its choices; no output follows."""

    def on_stall(self) -> None:
        """Handle a report that the node's step may never end; the request may be cancelled here."""

    @property
    def movable_tokens(self) -> int:
        """Tokens of KV that a move of the request would read; 0: it stays."""

    def move(self, to: NodeChoice) -> None:
        """Continue at another node, which reads the KV from the present one. Ignored if the request stays."""


class ServeStream:
    """Open from construction until ``close`` or until the node ends it; then every request on it has failed.

    A draining node gets no new request, and the stream ends with its last one. Requests that it leaves behind fail with
    Draining, so that they migrate.

    A message waits until the node reads it (gRPC's flow control). Beyond ``MAX_UNSENT`` bytes the stream takes no new
    request; only cancellations and pauses of requests in flight are added then.

    ``on_change`` is called whenever ``open`` or ``suspect`` changes.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        name: str,
        max_request: int,
        on_change: Callable[[ServeStream], None],
        epoch: str = "",
    ) -> None:
        """``max_request`` is what the node accepts, in bytes; in another ``epoch`` it refuses all requests."""
        self.name = name
        self.epoch = epoch  # the one that the node last reported
        self._max_request = max_request
        self.draining = False
        self._suspect: object | None = None
        self._on_change = on_change
        self._handlers: dict[int, OutputHandler] = {}
        self._next_number = 1
        self._queue: asyncio.Queue[pb.ServeRequest | None] = asyncio.Queue()  # None: no message follows
        self._unsent = 0  # bytes
        self._full = False
        self._rpc = DecodeNodeStub(channel).Serve(self._messages())
        self._end_reason: str | None = None
        self._reader = asyncio.create_task(self._read(), name=f"outputs of {name}")

    @property
    def ended(self) -> bool:
        return self._end_reason is not None

    @property
    def open(self) -> bool:
        """Whether the stream takes new requests."""
        return not (self.ended or self.draining or self._full)

    def generate(self, message: pb.Generate, handler: OutputHandler) -> int:
        """Send a request and return its number.

        Raises NodeLost after the end, Overloaded if the node does not read, RequestError beyond the node's limit.
        """
        if self.ended:
            raise NodeLost(f"decode node {self.name} is gone: {self._end_reason}")
        if self._full:
            raise Overloaded(
                f"decode node {self.name} does not read its requests; {self._unsent} bytes wait; try later"
            )
        number = self._next_number
        self._next_number += 1
        message.request, message.epoch = number, self.epoch
        messages = [*(pb.ServeRequest(resumed_choices=part) for part in _split_resume(message))]
        messages.append(pb.ServeRequest(generate=message))
        if (size := max(each.ByteSize() for each in messages)) > self._max_request:
            text = f"the request takes {size} bytes, decode node {self.name} takes {self._max_request} at most"
            raise RequestError(f"{text}; shorten its prompt")
        self._handlers[number] = handler
        for each in messages:
            self._put(each)
        return number

    @property
    def suspect(self) -> object | None:
        """The request on trial here (router/generation/migration.py); it stays if the engine ends under it."""
        return self._suspect

    @suspect.setter
    def suspect(self, suspect: object | None) -> None:
        self._suspect = suspect
        self._on_change(self)

    def cancel(self, number: int) -> None:
        """Abort a request at the node; its handler is not called again. Unknown and ended numbers are ignored."""
        if self._handlers.pop(number, None) is not None:
            self._put(pb.ServeRequest(cancel=pb.Cancel(request=number)))
            self._end_if_drained()

    def set_paused(self, number: int, paused: bool) -> None:
        """Have the node produce no more tokens of a request, or continue. Unknown and ended numbers are ignored."""
        if number in self._handlers:
            kind = {"pause": pb.Pause(request=number)} if paused else {"resume": pb.Resume(request=number)}
            self._put(pb.ServeRequest(**kind))

    def finished(self, number: int) -> None:
        """Forget a request that has ended. Unknown numbers are ignored."""
        if self._handlers.pop(number, None) is not None:
            self._end_if_drained()

    def drain(self) -> None:
        """Send no new request. Idempotent."""
        if not self.draining:
            self.draining = True
            self._on_change(self)
            self._end_if_drained()

    def report_stall(self) -> None:
        """Let each request decide whether it goes on at another node."""
        for handler in list(self._handlers.values()):
            handler.on_stall()

    def movable(self) -> list[OutputHandler]:
        """Return the requests that may move, those with the least KV first."""
        found = [(handler.movable_tokens, handler) for handler in self._handlers.values()]
        return [handler for tokens, handler in sorted(found, key=itemgetter(0)) if tokens]

    def close(self, reason: str) -> None:
        """End the stream and fail its requests. Idempotent."""
        if self.ended:
            return
        self._end_reason = reason
        self._reader.cancel()
        self._rpc.cancel()
        handlers, self._handlers = self._handlers, {}
        text = f"decode node {self.name} failed: {reason}"
        for handler in handlers.values():
            handler.on_failure(Draining(text) if self.draining else NodeLost(text))
        self._on_change(self)

    async def _read(self) -> None:
        reason = "it ended the stream"
        try:
            async for batch in self._rpc:
                if len(batch.outputs) > MAX_ENTRIES:
                    reason = f"it sent {len(batch.outputs)} outputs in a message, the limit is {MAX_ENTRIES}"
                    break
                if batch.draining:
                    self.drain()
                outputs = lightest_first(batch.outputs) if batch.ByteSize() > _SORTED_BYTES else batch.outputs
                for start in range(0, len(outputs), _OUTPUTS_AT_ONCE):
                    if start:
                        await asyncio.sleep(0)  # a step may have a thousand outputs, each with 20 log-probabilities
                    for output in outputs[start : start + _OUTPUTS_AT_ONCE]:
                        self._deliver(output)
        except grpc.aio.AioRpcError as exc:
            reason = rpc_reason(exc)
        except Exception:  # a bug; unread, the stream would hold its requests for ever
            logger.exception("outputs of decode node %s could not be handled", self.name)
            reason = "its outputs could not be handled"
        self.close(reason)

    def _deliver(self, output: pb.Output) -> None:
        handler = self._handlers.get(output.request)
        if handler is None:  # cancelled while these outputs were under way
            return
        if output.HasField("failure"):
            self.finished(output.request)
            handler.on_failure(failure_from_pb(output.failure))
        else:
            handler.on_output(output)

    def _put(self, message: pb.ServeRequest) -> None:
        self._queue.put_nowait(message)
        self._unsent += message.ByteSize() + _MESSAGE_BYTES
        if self._unsent > MAX_UNSENT and not self._full:
            self._full = True
            logger.warning("decode node %s does not read its requests; it gets no new ones until it does", self.name)
            self._on_change(self)

    async def _messages(self) -> AsyncIterator[pb.ServeRequest]:
        while (message := await self._queue.get()) is not None:
            yield message
            # gRPC asks for the next message when the transport has taken this one
            self._unsent -= message.ByteSize() + _MESSAGE_BYTES
            if self._full and self._unsent <= MAX_UNSENT // 2:
                self._full = False
                self._on_change(self)

    def _end_if_drained(self) -> None:
        """Half-close the stream of a draining node without requests, so that the node can exit."""
        if self.draining and not self._handlers:
            self._queue.put_nowait(None)


def lightest_first(outputs: Iterable[pb.Output]) -> list[pb.Output]:
    """Sort outputs by the work of their requests, so that a stream does not wait for another one with many choices.

    Those of a request stay in order.
    """
    work = Counter[int]()
    for output in outputs:
        work[output.request] += 1 + len(output.logprobs.top_ids)
    return sorted(outputs, key=lambda output: work[output.request])


def _split_resume(message: pb.Generate) -> Iterator[pb.ResumedChoices]:
    """Leave choices of RESUME_LIMIT bytes, or one longer choice, in the message; yield the others, to be sent first."""
    choices = list(message.resume)
    if sum(len(choice.token_ids) for choice in choices) <= RESUME_LIMIT:
        return
    del message.resume[:]
    part, size = pb.ResumedChoices(request=message.request), 0
    for choice in choices:
        if size and size + len(choice.token_ids) > RESUME_LIMIT:
            yield part
            part, size = pb.ResumedChoices(request=message.request), 0
        part.choices.append(choice)
        size += len(choice.token_ids)
    message.resume.extend(part.choices)
