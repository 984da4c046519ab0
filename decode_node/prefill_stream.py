"""The long-lived stream to one epoch of a prefill node, which multiplexes all handoffs from it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable

import grpc

from decode_node.background_tasks import BackgroundTasks
from decode_node.handoff import HandoffPeer, ToPeer
from pdserve.errors import Draining, Overloaded, PeerError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.errors import error_from_rpc
from pdserve.rpc.message_limits import MAX_ENTRIES

_MAX_UNSENT = 4096  # queued messages to P beyond which no prompt is added
_CLOSE_SECONDS = 2.0  # between the last message and the cancellation of the call, for P to receive released leases

Handler = Callable[[pb.PrefillEvent | PeerError], None]


class PrefillStream:
    """Open from construction until ``close`` or until P ends it.

    Each prompt has a handler, called with P's events in their order. The end of the stream is a PeerError to every
    handler. ``on_change`` is called after that end, and when P begins to drain. ``send`` queues without a limit, since
    a handoff sends only a few messages.
    """

    def __init__(
        self,
        stub: pb_grpc.PrefillNodeAsyncStub,
        peer: HandoffPeer,
        max_request: int,
        background: BackgroundTasks,
        on_change: Callable[[], None],
    ) -> None:
        """``max_request`` is what P accepts, in bytes."""
        self.peer = peer
        self.ended = ""  # reason
        self.draining = False  # P takes no more prompts
        self._max_request = max_request
        self._on_change = on_change
        self._handlers: dict[int, Handler] = {}
        self._numbers = itertools.count(1)
        self._unsent: asyncio.Queue[pb.HandoffRequest | None] = asyncio.Queue()  # None: end of the stream
        self._call = stub.Serve(self._requests())
        background.start(self._read(), f"stream from {peer.name}")

    @property
    def idle(self) -> bool:
        return not self._handlers

    def prefill(self, request: pb.PrefillRequest, handler: Handler) -> int:
        """Send a prompt; set its number and P's epoch, and return the number.

        Raises PeerError when the stream has ended or P takes no prompt of this size, Draining when P drains, Overloaded
        when P does not read.
        """
        if self.draining:
            raise Draining(f"{self.peer.name} is draining")
        if self.ended:
            raise PeerError(self.ended)
        if self._unsent.qsize() >= _MAX_UNSENT:
            waiting = self._unsent.qsize()
            raise Overloaded(f"{self.peer.name} does not read: {waiting} messages to it wait; try again later")
        request.request, request.epoch = next(self._numbers), self.peer.epoch
        message = pb.HandoffRequest(prefill=request)
        if (size := message.ByteSize()) > self._max_request:
            raise PeerError(f"the prompt takes {size} bytes, {self.peer.name} takes {self._max_request} at most")
        self._handlers[request.request] = handler
        self._unsent.put_nowait(message)
        return request.request

    def send(self, message: ToPeer) -> None:
        """Queue a message; it is lost if the stream has ended."""
        match message:
            case pb.ExtendRequest():
                self._unsent.put_nowait(pb.HandoffRequest(extend=message))
            case pb.ReleaseRequest():
                self._unsent.put_nowait(pb.HandoffRequest(release=message))

    def forget(self, number: int) -> None:
        """Drop the handler of a prompt. Idempotent."""
        self._handlers.pop(number, None)
        self._close_if_drained()

    def drain(self) -> None:
        """Add no prompts, and close when the last handler is forgotten. Idempotent."""
        if not self.draining:
            self.draining = True
            self._on_change()
            self._close_if_drained()

    def close(self, reason: str) -> None:
        """End the stream; messages that handlers send in response are still delivered. Idempotent."""
        if self.ended:
            return
        self.ended = reason
        for handler in list(self._handlers.values()):
            handler(PeerError(reason))
        self._handlers.clear()
        self._unsent.put_nowait(None)
        asyncio.get_running_loop().call_later(_CLOSE_SECONDS, self._call.cancel)
        self._on_change()

    def _close_if_drained(self) -> None:
        if self.draining and self.idle:
            self.close(f"{self.peer.name} is draining")

    async def _read(self) -> None:
        reason = f"{self.peer.name} ended the stream"
        try:
            async for message in self._call:
                if len(message.events) > MAX_ENTRIES:
                    reason = f"{self.peer.name} sent {len(message.events)} events in a message of {MAX_ENTRIES} at most"
                    break
                if message.draining:
                    self.drain()
                for event in message.events:
                    handler = self._handlers.get(event.request)
                    if handler is not None:  # else the event was in flight when the handoff ended
                        handler(event)
        except grpc.aio.AioRpcError as exc:
            reason = str(error_from_rpc(exc, self.peer.name))
        finally:  # also when the channel was closed, which cancels its calls
            self.close(reason)

    async def _requests(self) -> AsyncIterator[pb.HandoffRequest]:
        while (message := await self._unsent.get()) is not None:
            yield message
