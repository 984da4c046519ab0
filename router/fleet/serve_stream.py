"""The long-lived stream to one decode node, on which all requests of this router are multiplexed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc.aio

from pdserve.errors import Draining
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb.pdserve_pb2_grpc import DecodeNodeStub
from pdserve.rpc.errors import failure_from_pb, rpc_reason
from router.fleet.node_call import CallSink, NodeLost


class ServeStream:
    """Open from construction until ``close`` or until the node ends it; then every call on it has failed.

    A node that drains says so: from then on nothing new is sent, and the stream ends with its last call. What such a
    node leaves behind, however it ends, has failed with Draining: it is to go on elsewhere.

    ``on_change`` is called once at either.
    """

    def __init__(self, channel: grpc.aio.Channel, name: str, on_change: Callable[[ServeStream], None]) -> None:
        self.name = name
        self.draining = False
        self._on_change = on_change
        self._sinks: dict[int, CallSink] = {}
        self._next_number = 1
        self._outbox: asyncio.Queue[pb.ServeRequest | None] = asyncio.Queue()  # None: nothing follows
        self._call = DecodeNodeStub(channel).Serve(self._requests())
        self._closed: str | None = None  # why
        self._reader = asyncio.create_task(self._read(), name=f"outputs of {name}")

    @property
    def ended(self) -> bool:
        return self._closed is not None

    @property
    def open(self) -> bool:
        """For new calls."""
        return self._closed is None and not self.draining

    @property
    def in_flight(self) -> int:
        return len(self._sinks)

    def generate(self, message: pb.Generate, sink: CallSink) -> int:
        """Send a request whose outputs go to ``sink``; returns its number. NodeLost when the stream has ended."""
        if self._closed is not None:
            raise NodeLost(f"decode node {self.name} is gone: {self._closed}")
        number = self._next_number
        self._next_number += 1
        message.request = number
        self._sinks[number] = sink
        self._outbox.put_nowait(pb.ServeRequest(generate=message))
        return number

    def cancel(self, number: int) -> None:
        """End a request at the node; nothing more is delivered. Unknown and ended numbers are ignored."""
        if self._sinks.pop(number, None) is not None:
            self._outbox.put_nowait(pb.ServeRequest(cancel=pb.Cancel(request=number)))
            self._end_if_drained()

    def finished(self, number: int) -> None:
        """All choices of a request have ended; forget it."""
        if self._sinks.pop(number, None) is not None:
            self._end_if_drained()

    def drain(self) -> None:
        """The node takes nothing new. Idempotent."""
        if not self.draining:
            self.draining = True
            self._on_change(self)
            self._end_if_drained()

    def close(self, reason: str) -> None:
        """End the stream; calls on it fail. Idempotent."""
        if self._closed is not None:
            return
        self._closed = reason
        self._reader.cancel()
        self._call.cancel()
        sinks, self._sinks = self._sinks, {}
        text = f"decode node {self.name} failed: {reason}"
        for sink in sinks.values():
            sink.on_failure(Draining(text) if self.draining else NodeLost(text))
        self._on_change(self)

    async def _read(self) -> None:
        reason = "it ended the stream"
        try:
            async for batch in self._call:
                if batch.draining:
                    self.drain()
                for output in batch.outputs:
                    self._deliver(output)
        except grpc.aio.AioRpcError as exc:
            reason = rpc_reason(exc)
        self.close(reason)

    def _deliver(self, output: pb.Output) -> None:
        sink = self._sinks.get(output.request)
        if sink is None:  # cancelled; these tokens were on their way
            return
        if output.HasField("failure"):
            self._sinks.pop(output.request, None)
            self._end_if_drained()
            sink.on_failure(failure_from_pb(output.failure))
        else:
            sink.on_output(output)

    async def _requests(self) -> AsyncIterator[pb.ServeRequest]:
        while (message := await self._outbox.get()) is not None:
            yield message

    def _end_if_drained(self) -> None:
        """Nothing is under way, and nothing will be: the node may end."""
        if self.draining and not self._sinks:
            self._outbox.put_nowait(None)
