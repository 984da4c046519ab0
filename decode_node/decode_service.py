"""The DecodeNode service: one stream per router, all its requests in, all its outputs out."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Any

from decode_node.generation import NodeGeneration
from decode_node.handoff_driver import HandoffContext, HandoffDriver
from decode_node.request_trace import RequestTrace
from decode_node.settings import FailurePolicy
from engine.frontend.drain import Streams
from engine.frontend.node_context import NodeContext
from engine.frontend.request_checks import check_request, check_resume
from engine.frontend.stream_writer import Context, StreamWriter, serve
from engine.ipc.messages import Mode
from pdserve.errors import Draining, PdserveError, RequestError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.request_cost import worth_handoff
from pdserve.rpc.errors import failure_to_pb
from pdserve.rpc.protobuf import sampling_from_pb, unpack_tokens
from pdserve.tracing.spans import Attributes


class RouterStream:
    """The way back to one router. What is added before it is sent travels in one message, so a step is a message."""

    def __init__(self) -> None:
        self.generations: dict[int, NodeGeneration] = {}
        self.writer = StreamWriter(pb.OutputBatch)

    def is_idle(self) -> bool:
        return not self.generations and self.writer.empty

    def add(self, request: int, bulk: int = 0) -> pb.Output:
        """A new output at the end of what is sent next, to be filled in at once; of ``bulk`` bytes if it is large."""
        output = self.writer.put(bulk).outputs.add()
        output.request = request
        return output

    def forget(self, generation: NodeGeneration) -> None:
        self.generations.pop(generation.number, None)
        self.writer.wake()

    def cancel(self) -> None:
        for generation in list(self.generations.values()):
            generation.cancel()

    def fail(self, error: PdserveError) -> None:
        for generation in list(self.generations.values()):
            generation.fail(error)


class DecodeService(pb_grpc.DecodeNodeServicer):
    def __init__(self, node: NodeContext, handoffs: HandoffContext) -> None:
        self._node = node
        self._handoffs = handoffs
        self._streams: Streams[RouterStream] = Streams()
        self.release_timeout = node.config.peer_timing.answer_timeout

    async def finish(self) -> None:
        """Tell routers that nothing is taken in any more; returns when no request runs."""
        self._streams.drain()
        await self._streams.until(lambda: not any(stream.generations for stream in self._streams))

    def hand_over(self, why: Draining) -> None:
        """Have routers take back what runs."""
        self._streams.drain()
        for stream in self._streams:
            stream.fail(why)

    async def wait_released(self) -> None:
        await self._streams.ended()

    async def Serve(  # type: ignore[override]  # it writes to its context: a generator is not told of a broken stream
        self, request_iterator: AsyncIterable[pb.ServeRequest], context: Context
    ) -> None:
        stream = RouterStream()
        with self._streams.opened(stream):
            try:
                await serve(context, stream.writer, self._read(stream, request_iterator), stream.is_idle)
            finally:
                stream.cancel()

    async def _read(self, stream: RouterStream, requests: AsyncIterable[pb.ServeRequest]) -> None:
        """Raises RequestError when the router breaks the protocol."""
        async for message in requests:
            match message.WhichOneof("kind"):
                case "generate":
                    self._generate(stream, message.generate)
                case "cancel":
                    generation = stream.generations.get(message.cancel.request)
                    if generation is not None:
                        generation.cancel()
                case _:
                    raise RequestError("a ServeRequest is neither generate nor cancel; use the same version everywhere")

    def _generate(self, stream: RouterStream, message: pb.Generate) -> None:
        if message.request in stream.generations:
            raise RequestError(f"request {message.request} is running on this stream already; number them uniquely")
        counters = self._handoffs.counters
        counters["pdserve_decode_requests_total"] += 1
        try:
            self._node.check_ready()
            tokens, sampling = unpack_tokens(message.token_ids), sampling_from_pb(message.sampling)
            resume = {choice.choice: unpack_tokens(choice.token_ids) for choice in message.resume}
            check_request(tokens, sampling, self._node.config)
            check_resume(resume, sampling, self._node.config)
        except PdserveError as exc:
            self._count_failure(exc)
            stream.add(message.request).failure.CopyFrom(failure_to_pb(exc))
            return
        trace = self._trace(message, len(tokens))
        generation = NodeGeneration(
            message, len(tokens), sampling, self._node.engine, stream, self._ended(stream), trace
        )
        stream.generations[message.request] = generation
        self._place(generation, message.prefill_node)

    def _trace(self, message: pb.Generate, num_tokens: int) -> RequestTrace:
        attributes: Attributes = {"pdserve.request_id": message.request_id, "gen_ai.usage.input_tokens": num_tokens}
        span = self._node.tracer.continue_span("decode node", message.traceparent, message.tracestate, attributes)
        metrics, told = self._handoffs.metrics, self._node.log_requests
        return RequestTrace(message.request_id, span, metrics, resumed=bool(message.resume), told=told)

    def _ended(self, stream: RouterStream) -> Any:
        def on_end(generation: NodeGeneration) -> None:
            if generation.error is not None:
                self._count_failure(generation.error)
            stream.forget(generation)
            self._streams.changed()

        return on_end

    def _count_failure(self, error: PdserveError) -> None:
        handed_over = isinstance(error, Draining)
        name = "pdserve_requests_handed_over_total" if handed_over else "pdserve_decode_request_failures_total"
        self._handoffs.counters[name] += 1

    def _place(self, generation: NodeGeneration, prefill_node: str) -> None:
        """Hand off, or prefill here, as is done wherever log-probabilities of the prompt are asked for."""
        settings, counters = self._handoffs.settings, self._handoffs.counters
        worth_it = worth_handoff(
            generation.num_tokens, generation.sampling.prompt_logprobs, settings.handoff_min_tokens
        )
        if not (prefill_node and worth_it):
            counters["pdserve_local_prefills_total"] += 1
            generation.submit(Mode.LOCAL)
            return
        try:
            peer = self._handoffs.peers.get(prefill_node)
        except PdserveError as exc:
            counters["pdserve_handoff_failures_total"] += 1
            if settings.failure_policy is FailurePolicy.FAIL:
                generation.fail(exc)
                return
            counters["pdserve_handoff_recomputes_total"] += 1
            counters["pdserve_handoff_recomputed_tokens_total"] += generation.num_tokens
            generation.submit(Mode.LOCAL)
        else:
            generation.handoff = HandoffDriver(self._handoffs, generation, peer)
            generation.submit(Mode.HANDOFF)
