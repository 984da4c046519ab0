"""The DecodeNode service: one stream per router, which carries all of its requests and their outputs."""

from __future__ import annotations

from collections.abc import AsyncIterable

from decode_node.generation import NodeGeneration, RouterStream
from decode_node.handoff_context import HandoffContext
from decode_node.handoff_driver import HandoffDriver
from decode_node.request_trace import RequestTrace
from node.context import NodeContext
from node.drain import Streams
from node.request_checks import check_request, check_resume
from node.stream_writer import Context, serve
from pdserve.errors import Draining, PdserveError, RequestError
from pdserve.ipc.messages import Mode
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.errors import failure_to_pb
from pdserve.rpc.protobuf import sampling_from_pb, unpack_resumed, unpack_tokens
from pdserve.tracing.spans import Attributes

RESUMED_LENGTHS = 128  # resumed tokens of a request, in lengths of the longest context: one per choice


class DecodeService(pb_grpc.DecodeNodeServicer):
    def __init__(self, node: NodeContext, handoffs: HandoffContext) -> None:
        self._node = node
        self._handoffs = handoffs
        self._streams: Streams[RouterStream] = Streams()
        self.release_timeout = node.config.peer_timing.answer_timeout

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
        stream = RouterStream()
        with self._streams.opened(stream):
            try:
                read = self._read(stream, request_iterator)
                await serve(context, stream.writer, read, stream.is_idle, self._node.violations)
            finally:
                for generation in tuple(stream.generations.values()):
                    generation.cancel()

    async def _read(self, stream: RouterStream, requests: AsyncIterable[pb.ServeRequest]) -> None:
        """Handle messages until the router ends the stream. Raises RequestError for a protocol violation."""
        async for message in requests:
            match message.WhichOneof("kind"):
                case "resumed_choices":
                    stream.add_resumed(message.resumed_choices, RESUMED_LENGTHS * self._node.config.max_model_len)
                case "generate":
                    message.generate.resume.extend(stream.take_resumed(message.generate.request))
                    self._generate(stream, message.generate)
                    await stream.writer.room()
                case "cancel":
                    if (generation := stream.find(message.cancel.request)) is not None:
                        generation.cancel()
                case "pause" | "resume" as kind:
                    if (generation := stream.find(getattr(message, kind).request)) is not None:
                        generation.set_paused(kind == "pause")
                case _:
                    raise RequestError("a ServeRequest has no known kind; use the same version everywhere")

    def _generate(self, stream: RouterStream, message: pb.Generate) -> None:
        if message.request in stream.generations:
            raise RequestError(f"request {message.request} is running on this stream already; number them uniquely")
        node, stream.largest = self._node, max(stream.largest, message.request)
        self._handoffs.counters["pdserve_decode_requests_total"] += 1
        try:
            node.check_ready()
            if message.epoch not in ("", node.epoch):
                raise Draining(f"{node.name} has other weights than when it was chosen; send the request again")
            tokens, sampling = unpack_tokens(message.token_ids), sampling_from_pb(message.sampling)
            resume = unpack_resumed(message.resume)
            check_request(tokens, sampling, node.config)
            check_resume(resume, sampling, node.config)
        except PdserveError as exc:
            self._count_failure(exc)
            stream.add(message.request).failure.CopyFrom(failure_to_pb(exc))
            return
        trace = self._begin_trace(message, len(tokens))
        generation = NodeGeneration(message, sampling, node.engine, stream, self._on_end, trace)
        stream.generations[message.request] = generation
        self._submit(generation, message.prefill_node)

    def _begin_trace(self, message: pb.Generate, num_tokens: int) -> RequestTrace:
        node = self._node
        attributes: Attributes = {"pdserve.request_id": message.request_id, "gen_ai.usage.input_tokens": num_tokens}
        span = node.tracer.continue_span("decode node", message.traceparent, message.tracestate, attributes)
        return RequestTrace(message.request_id, span, self._handoffs.metrics, bool(message.resume), node.log_requests)

    def _on_end(self, generation: NodeGeneration) -> None:
        if generation.error is not None:
            self._count_failure(generation.error)
        self._streams.changed()

    def _count_failure(self, error: PdserveError) -> None:
        handed_over = isinstance(error, Draining)
        name = "pdserve_requests_handed_over_total" if handed_over else "pdserve_decode_request_failures_total"
        self._handoffs.counters[name] += 1

    def _submit(self, generation: NodeGeneration, prefill_node: str) -> None:
        handoffs = self._handoffs
        if not prefill_node:
            handoffs.counters["pdserve_local_prefills_total"] += 1
        if not prefill_node or not handoffs.worth(generation, generation.num_handoff_tokens):
            generation.submit(Mode.LOCAL)
            return
        try:
            peer = handoffs.peers.get(prefill_node)
        except PdserveError as exc:
            if handoffs.recomputes(exc, generation.num_handoff_tokens):
                generation.submit(Mode.LOCAL)
            else:
                generation.fail(exc)
        else:
            generation.handoff = HandoffDriver(handoffs, generation, peer)
            generation.submit(Mode.HANDOFF)
