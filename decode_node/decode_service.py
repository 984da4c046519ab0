"""The DecodeNode service: one stream per router, which carries all of its requests and their outputs."""

from __future__ import annotations

from collections.abc import AsyncIterable

from decode_node.handoff_driver import Handoffs
from decode_node.router_stream import RouterStream
from node.context import NodeContext
from node.streams.served_streams import ServedStreams
from node.streams.stream_writer import Context
from pdserve.errors import Draining
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc


class DecodeService(pb_grpc.DecodeNodeServicer):
    """A Drainable."""

    def __init__(self, node: NodeContext, handoffs: Handoffs) -> None:
        self._node = node
        self._handoffs = handoffs
        self._streams: ServedStreams[RouterStream] = ServedStreams(node.violations)
        self.release_timeout = node.config.options.peer_timing.answer_timeout

    async def finish(self) -> None:
        self._streams.drain()
        await self._streams.until(lambda: not any(stream.generations for stream in self._streams))

    def hand_over(self, why: Draining) -> None:
        self._streams.drain()
        for stream in self._streams:
            for generation in tuple(stream.generations.values()):
                generation.fail(why)

    def reopen(self) -> None:
        self._streams.reopen()

    async def wait_released(self) -> None:
        await self._streams.ended()

    async def Serve(  # type: ignore[override]  # not a generator, which would not notice a broken stream
        self, request_iterator: AsyncIterable[pb.ServeRequest], context: Context
    ) -> None:
        stream = RouterStream(self._node, self._handoffs, self._streams.changed)
        await self._streams.serve(stream, request_iterator, context)
