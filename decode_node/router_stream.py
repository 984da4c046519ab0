"""The stream of one router on D: messages become requests; the outputs of a step return in one message."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable

from decode_node.generation import NodeGeneration
from decode_node.handoff_driver import Handoffs
from decode_node.request_trace import RequestTrace
from node.context import NodeContext
from node.request_checks import check_choices, check_images, check_request, check_resume
from node.streams.served_streams import ServedStream
from pdserve.errors import Draining, PdserveError, RequestError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import TOKEN_BYTES
from pdserve.rpc.errors import failure_to_pb
from pdserve.rpc.field_ranges import check_message
from pdserve.rpc.protobuf import resumed_outputs, sampling_from_pb
from pdserve.tracing.spans import Attributes

_RESUMED_LENGTHS = 128  # most resumed tokens of a request, in longest contexts: one per choice


class RouterStream(ServedStream[pb.ServeRequest, pb.OutputBatch]):
    """The requests of one router, by its numbers."""

    def __init__(self, node: NodeContext, handoffs: Handoffs, on_change: Callable[[], None]) -> None:
        """``on_change`` is called after each request's end."""
        super().__init__(pb.OutputBatch)
        self.generations: dict[int, NodeGeneration] = {}
        self._node = node
        self._handoffs = handoffs
        self._on_change = on_change
        self._resumed = pb.ResumedChoices()  # choices of the request that follows

    async def read(self, requests: AsyncIterable[pb.ServeRequest]) -> None:
        async for message in requests:
            match message.WhichOneof("kind"):
                case "resumed_choices":
                    self._add_resumed(message.resumed_choices)
                case "generate":
                    self._generate(message.generate)
                    await self.writer.room()
                case "cancel":
                    if (generation := self._find(message.cancel.request)) is not None:
                        generation.cancel()
                case "pause" | "resume" as kind:
                    if (generation := self._find(getattr(message, kind).request)) is not None:
                        generation.set_paused(kind == "pause")
                case _:
                    raise RequestError("a ServeRequest has no known kind; use the same version everywhere")

    @property
    def idle(self) -> bool:
        return not self.generations and self.writer.empty

    def close(self) -> None:
        for generation in tuple(self.generations.values()):
            generation.cancel()

    def _find(self, number: int) -> NodeGeneration | None:
        """Return a request, None if it has ended. Raises RequestError if it was never sent on this stream."""
        self.check_number(number)
        return self.generations.get(number)

    def _add_resumed(self, resumed: pb.ResumedChoices) -> None:
        """Keep choices of the next request. Raises RequestError for several requests or too many tokens."""
        kept = self._resumed
        max_tokens = _RESUMED_LENGTHS * self._node.config.max_model_len
        if kept.choices and kept.request != resumed.request:
            raise RequestError(f"choices of request {resumed.request} came before request {kept.request} itself")
        kept.MergeFrom(resumed)
        if (size := kept.ByteSize()) > max_tokens * TOKEN_BYTES:
            raise RequestError(f"resumed choices take {size} bytes, the limit is {max_tokens} tokens; resume fewer")

    def _take_resumed(self, request: int) -> Iterable[pb.ResumedChoice]:
        """Return the choices that came before the request."""
        kept = self._resumed
        self._resumed = pb.ResumedChoices()
        return kept.choices if kept.request == request else ()

    def _generate(self, message: pb.Generate) -> None:
        """Begin a request, or answer why not. Raises RequestError for a number that is in use."""
        number = message.request
        if number in self.generations:
            raise RequestError(f"request {number} is running on this stream already; number them uniquely")
        self.add_number(number)
        message.resume.extend(self._take_resumed(number))
        self._handoffs.metrics.requests.inc()
        try:
            generation = self._begin(message)
        except PdserveError as exc:
            self._count_failure(exc)
            failure = failure_to_pb(exc)
            self.writer.put(failure.ByteSize()).outputs.append(pb.Output(request=number, failure=failure))
            return
        self.generations[number] = generation
        self._handoffs.submit(generation, message.prefill_node)

    def _begin(self, message: pb.Generate) -> NodeGeneration:
        """Raises PdserveError for a request that cannot be served."""
        node = self._node
        node.check_ready()
        if message.epoch not in ("", node.epoch):
            raise Draining(f"{node.name} has other weights than when it was chosen; send the request again")
        check_message(message)
        token_ids = message.token_ids
        sampling = sampling_from_pb(message.sampling)
        num_tokens = check_request(token_ids, sampling, node.config)
        resume = resumed_outputs(message.resume)
        check_resume(resume, sampling, node.config)
        images = check_images(message.images, token_ids, node.config)
        check_choices(images, sampling.n, num_tokens, node.config)
        return NodeGeneration(
            message,
            token_ids=token_ids,
            sampling=sampling,
            resume=resume,
            images=images,
            node=node,
            writer=self.writer,
            trace=self._begin_trace(message, num_tokens),
            on_end=self._on_end,
        )

    def _begin_trace(self, message: pb.Generate, num_tokens: int) -> RequestTrace:
        node = self._node
        attributes: Attributes = {"pdserve.request_id": message.request_id, "gen_ai.usage.input_tokens": num_tokens}
        span = node.tracer.continue_span("decode node", message.traceparent, message.tracestate, attributes)
        return RequestTrace(
            message.request_id,
            span,
            self._handoffs.metrics,
            resumed=bool(message.resume),
            log=node.log_requests,
        )

    def _on_end(self, generation: NodeGeneration) -> None:
        if generation.error is not None:
            self._count_failure(generation.error)
        self.generations.pop(generation.number, None)
        self.writer.wake()
        self._on_change()

    def _count_failure(self, error: PdserveError) -> None:
        handed_over = isinstance(error, Draining)
        metrics = self._handoffs.metrics
        (metrics.handed_over if handed_over else metrics.request_failures).inc()
