"""D's stream to a prefill node that does not read, or ends the stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from node.reading.peer_stream import PeerStream
from pdserve.errors import Draining, Overloaded, PeerError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.records import Peer
from pdserve.rpc.channel import open_channel

Serve = Callable[[AsyncIterator[pb.HandoffRequest], Any], Awaitable[None]]


@asynccontextmanager
async def stream_to(serve: Serve, changed: asyncio.Event) -> AsyncIterator[PeerStream]:
    """Open a stream to a prefill node that runs ``serve``; set ``changed`` when the stream drains or has ended."""

    class Servicer(pb_grpc.PrefillNodeServicer):
        async def Handshake(self, request: pb.HandshakeRequest, context: Any) -> pb.HandshakeReply:
            raise NotImplementedError

        async def Serve(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
            await serve(request_iterator, context)

    server = grpc.aio.server()
    pb_grpc.add_PrefillNodeServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub: pb_grpc.PrefillNodeAsyncStub = pb_grpc.PrefillNodeStub(channel)
        stream = PeerStream(stub, Peer("p", "epoch", ()), max_request=1 << 20, on_change=changed.set)
        yield stream
        stream.close("the test has ended")
    await server.stop(0)


def test_a_peer_that_does_not_read_gets_no_more_prompts() -> None:
    async def serve(requests: AsyncIterator[pb.HandoffRequest], context: Any) -> None:
        await asyncio.sleep(60.0)

    async def flood(stream: PeerStream) -> None:
        for _ in range(1 << 16):
            stream.prefill(pb.PrefillRequest(token_ids=bytes(4000)), lambda event: None)
            await asyncio.sleep(0)

    async def run() -> None:
        async with stream_to(serve, asyncio.Event()) as stream:
            with pytest.raises(Overloaded, match="p does not read"):
                await flood(stream)

    asyncio.run(run())


def test_the_end_of_the_stream_fails_every_prompt_once() -> None:
    """First P ends the stream after it has read one of three prompts; then D ends it."""

    async def serve(requests: AsyncIterator[pb.HandoffRequest], context: Any) -> None:
        async for _ in requests:
            return

    async def stay(requests: AsyncIterator[pb.HandoffRequest], context: Any) -> None:
        async for _ in requests:
            pass

    async def run(serve: Serve, close: bool) -> None:
        ended = asyncio.Event()
        async with stream_to(serve, ended) as stream:
            events: list[pb.PrefillEvent | PeerError] = []
            for _ in range(3):
                stream.prefill(pb.PrefillRequest(), events.append)
            if close:
                stream.close("p was lost")
            await asyncio.wait_for(ended.wait(), 20.0)
            assert [type(event) for event in events] == [PeerError] * 3
            with pytest.raises(PeerError):
                stream.prefill(pb.PrefillRequest(), events.append)

    asyncio.run(run(serve, close=False))
    asyncio.run(run(stay, close=True))


def test_a_draining_peer_keeps_its_prompts_and_gets_no_other() -> None:
    """The draining peer's stream ends when it has read the release of the last prompt."""
    released: list[int] = []

    async def serve(requests: AsyncIterator[pb.HandoffRequest], context: Any) -> None:
        async for request in requests:
            if request.WhichOneof("kind") == "prefill":
                await context.write(pb.PrefillEvents(draining=True))
            else:
                released.append(request.release.request)

    async def run() -> None:
        changed = asyncio.Event()
        async with stream_to(serve, changed) as stream:
            number = stream.prefill(pb.PrefillRequest(), lambda event: None)
            async with asyncio.timeout(20.0):
                while not stream.draining:
                    await changed.wait()
                    changed.clear()
                with pytest.raises(Draining):
                    stream.prefill(pb.PrefillRequest(), lambda event: None)
                stream.send(pb.ReleaseRequest(request=number))
                stream.forget(number)
                while not stream.ended:
                    await changed.wait()
                    changed.clear()
            assert released == [number]

    asyncio.run(run())
