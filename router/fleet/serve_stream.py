"""The long-lived gRPC stream to one decode node; all requests of this router to that node share it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol

import grpc.aio

from pdserve.errors import Draining, NodeError, PdserveError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb.pdserve_pb2_grpc import DecodeNodeStub
from pdserve.rpc.errors import failure_from_pb
from pdserve.rpc.message_limits import RESUME_LIMIT
from pdserve.rpc.multiplexed_stream import MultiplexedStream
from router.fleet.policy import Placement

if TYPE_CHECKING:  # exists in the stubs' types only
    from pdserve.pb.pdserve_pb2_grpc import DecodeNodeAsyncStub

_SORTED_BYTES = 8192  # larger batches are sorted; 8 KiB take a few ms: 40 outputs with log-probabilities, 700 without


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

    def move(self, to: Placement) -> None:
        """Continue at another node from the next token on. It reads the KV from the present one.

        Ignored if the request stays. Its pause would be half a step longer if it left between two tokens: what a step
        in flight computes for it is lost.
        """


class ServeStream(MultiplexedStream[pb.ServeRequest, pb.OutputBatch, pb.Output, OutputHandler]):
    """The stream to a decode node.

    Requests that a draining node leaves behind fail with Draining, so that they migrate. ``on_change`` is also called
    whenever ``suspect`` changes.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        name: str,
        *,
        max_request: int,
        on_change: Callable[[], None],
        epoch: str = "",
    ) -> None:
        """``max_request``: bytes of the largest accepted request. A node in another ``epoch`` refuses all requests."""
        stub: DecodeNodeAsyncStub = DecodeNodeStub(channel)
        super().__init__(
            stub.Serve,
            node=f"decode node {name}",
            max_request=max_request,
            linger=0.0,  # the node stops the requests at once
            on_change=on_change,
        )
        self.epoch = epoch  # epoch that the node last reported
        self._suspect: object | None = None

    def generate(self, message: pb.Generate, handler: OutputHandler) -> int:
        """Send a request and return its number.

        Raises NodeLost after the end, Draining, Overloaded if the node does not read, RequestError beyond its limit.
        """
        self._check_open()
        message.request = number = next(self._numbers)
        message.epoch = self.epoch
        messages = [pb.ServeRequest(resumed_choices=part) for part in _split_resume(message)]
        messages.append(pb.ServeRequest(generate=message))
        self._begin(number, handler, messages)
        return number

    @property
    def suspect(self) -> object | None:
        """The request on trial here (router/generation/migration.py); it stays if the engine ends under it."""
        return self._suspect

    @suspect.setter
    def suspect(self, suspect: object | None) -> None:
        self._suspect = suspect
        self._on_change()

    def cancel(self, number: int) -> None:
        """Abort a request at the node; its handler is not called again. Unknown and ended numbers are ignored."""
        if number in self._handlers:
            self._send(pb.ServeRequest(cancel=pb.Cancel(request=number)))
            self.forget(number)

    def set_paused(self, number: int, paused: bool) -> None:
        """Have the node produce no more tokens of a request, or continue. Unknown and ended numbers are ignored."""
        if number not in self._handlers:
            return
        if paused:
            self._send(pb.ServeRequest(pause=pb.Pause(request=number)))
        else:
            self._send(pb.ServeRequest(resume=pb.Resume(request=number)))

    def report_stall(self) -> None:
        """Let each request decide whether it goes on at another node."""
        for handler in list(self._handlers.values()):
            handler.on_stall()

    def movable(self) -> list[OutputHandler]:
        """Return the requests that may move, those with the least KV first."""
        handlers = [(handler.movable_tokens, handler) for handler in self._handlers.values()]
        return [handler for tokens, handler in sorted(handlers, key=itemgetter(0)) if tokens]

    def _entries(self, batch: pb.OutputBatch) -> Sequence[pb.Output]:
        return lightest_first(batch.outputs) if batch.ByteSize() > _SORTED_BYTES else batch.outputs

    def _deliver(self, handler: OutputHandler, entry: pb.Output) -> None:
        if entry.HasField("failure"):
            self.forget(entry.request)
            handler.on_failure(failure_from_pb(entry.failure))
        else:
            handler.on_output(entry)

    def _fail(self, handler: OutputHandler, error: PdserveError) -> None:
        handler.on_failure(error)

    def _end_error(self, reason: str) -> PdserveError:
        text = f"{self._node} failed: {reason}"
        return Draining(text) if self.draining else NodeLost(text)


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
    part = pb.ResumedChoices(request=message.request)
    size = 0
    for choice in choices:
        if size and size + len(choice.token_ids) > RESUME_LIMIT:
            yield part
            part = pb.ResumedChoices(request=message.request)
            size = 0
        part.choices.append(choice)
        size += len(choice.token_ids)
    message.resume.extend(part.choices)
