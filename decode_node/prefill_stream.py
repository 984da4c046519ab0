"""The long-lived stream to one life of a prefill node, on which all handoffs from it are multiplexed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable

import grpc

from decode_node.background_tasks import BackgroundTasks
from decode_node.remote_prefill import Listener, RemotePrefill
from pdserve.errors import Draining, Overloaded, PeerError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.channel import error_from_rpc
from pdserve.rpc.timeouts import PeerTiming

_MOST_UNSENT = 4096  # messages that wait for P to read
_GOODBYE_SECONDS = 2.0  # for P to take in what it gets back at the end


class PrefillStream:
    """Open from construction until ``close`` or until P ends it; then every prompt on it has failed.

    ``on_change`` is called after that, and when P says that it takes no more. What is sent waits for P to read (gRPC's
    flow control): no prompt is added while ``_MOST_UNSENT`` messages do, and the others are a few for each handoff
    under way.
    """

    def __init__(
        self,
        stub: pb_grpc.PrefillNodeAsyncStub,
        peer: str,
        epoch: str,
        timing: PeerTiming,
        background: BackgroundTasks,
        on_change: Callable[[], None],
    ) -> None:
        self.timing = timing
        self.peer = peer
        self.epoch = epoch
        self.ended = ""  # why
        self.draining = False  # P takes no more prompts
        self._on_change = on_change
        self._prefills: dict[int, RemotePrefill] = {}
        self._numbers = itertools.count(1)
        self._outbox: asyncio.Queue[pb.HandoffRequest | None] = asyncio.Queue()
        self._call = stub.Serve(self._requests())
        background.start(self._read(), f"stream from {peer}")

    @property
    def idle(self) -> bool:
        """Nothing is expected of it."""
        return not self._prefills

    def prefill(self, request: pb.PrefillRequest, listener: Listener) -> RemotePrefill:
        """Ask P for a prompt; ``request`` lacks its number and P's epoch. Raises PeerError when the stream has ended,
        Overloaded when P drains, or does not read it.
        """
        if self.draining:
            raise Draining(f"{self.peer} is draining")
        if self.ended:
            raise PeerError(self.ended)
        if self._outbox.qsize() >= _MOST_UNSENT:
            raise Overloaded(f"{self.peer} does not read: {self._outbox.qsize()} messages to it wait; try again later")
        request.request, request.epoch = next(self._numbers), self.epoch
        prefill = self._prefills[request.request] = RemotePrefill(self, request.request, listener)
        self.send(pb.HandoffRequest(prefill=request))
        return prefill

    def send(self, message: pb.HandoffRequest) -> None:
        """It is lost when the stream has ended."""
        self._outbox.put_nowait(message)

    def forget(self, number: int) -> None:
        """Nothing more is expected of a prompt."""
        self._prefills.pop(number, None)
        self._close_if_drained()

    def drain(self) -> None:
        """Have it end when nothing is expected of it any more. Idempotent."""
        if not self.draining:
            self.draining = True
            self._on_change()
            self._close_if_drained()

    def close(self, reason: str) -> None:
        """End it, and everything on it; what is given back at that is still sent. Idempotent."""
        if self.ended:
            return
        self.ended = reason
        for prefill in list(self._prefills.values()):
            prefill.stream_ended(PeerError(reason))
        self._prefills.clear()
        self._outbox.put_nowait(None)
        asyncio.get_running_loop().call_later(_GOODBYE_SECONDS, self._call.cancel)
        self._on_change()

    def _close_if_drained(self) -> None:
        if self.draining and self.idle:
            self.close(f"{self.peer} is draining")

    async def _read(self) -> None:
        reason = f"{self.peer} ended the stream"
        try:
            async for message in self._call:
                if message.draining:
                    self.drain()
                for event in message.events:
                    prefill = self._prefills.get(event.request)
                    if prefill is not None:  # else it was given up, and this was on its way
                        prefill.take(event)
        except grpc.aio.AioRpcError as exc:
            reason = str(error_from_rpc(exc, self.peer))
        finally:  # also when the channel was closed, which cancels its calls
            self.close(reason)

    async def _requests(self) -> AsyncIterator[pb.HandoffRequest]:
        while (message := await self._outbox.get()) is not None:
            yield message
