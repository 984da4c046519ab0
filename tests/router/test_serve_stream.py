"""The stream of one router to a decode node, with a scripted node."""

from __future__ import annotations

import asyncio

from scripted_node import Conversation, ScriptedNode

from pdserve.errors import PdserveError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.channel import open_channel
from pdserve.rpc.message_limits import request_limit
from router.fleet.policy import Placement
from router.fleet.serve_stream import NodeLost, ServeStream


class Handler:
    """Keeps the end of a request. ``broken``: a bug in handling its failure."""

    def __init__(self, broken: bool = False) -> None:
        self.ended: asyncio.Future[PdserveError] = asyncio.get_running_loop().create_future()
        self._broken = broken

    def on_output(self, output: pb.Output) -> None: ...

    def on_failure(self, error: PdserveError) -> None:
        self.ended.set_result(error)
        if self._broken:
            raise ValueError("a bug")

    def on_stall(self) -> None: ...

    movable_tokens = 0

    def move(self, to: Placement) -> None: ...


def test_requests_leave_a_stream_that_is_not_read_any_more() -> None:
    """An error in one request's handler ends the stream: unread, it would hold the others for ever."""
    node = ScriptedNode("model")

    async def fail(conversation: Conversation) -> None:
        conversation.fail(pb.Failure.NODE_FAILED)

    async def wait(conversation: Conversation) -> None:
        await conversation.cancelled.wait()

    node.scripts = {"fail": fail, "wait": wait}

    async def run() -> None:
        async with open_channel(node.address) as channel:
            stream = ServeStream(channel, "d", max_request=request_limit(1000), on_change=lambda: None)
            waiting = Handler()
            failing = Handler(broken=True)
            stream.generate(pb.Generate(cache_salt="wait"), waiting)
            stream.generate(pb.Generate(cache_salt="fail"), failing)
            async with asyncio.timeout(20.0):
                assert isinstance(await waiting.ended, NodeLost)
            assert failing.ended.done()
            assert stream.ended

    try:
        asyncio.run(run())
    finally:
        node.close()
