"""The stream of one decode node: translates its messages into prefills and leases, and what becomes of these back."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable
from typing import Any

from engine.frontend.node_context import NodeContext
from engine.frontend.request_checks import check_request, check_skip
from engine.frontend.stream_writer import StreamWriter
from engine.ipc.messages import Leased
from pdserve.errors import PdserveError, PeerError, RequestError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import Sample
from pdserve.rpc.errors import failure_to_pb
from pdserve.rpc.protobuf import logprobs_to_pb, sampling_from_pb, unpack_tokens
from pdserve.tracing.spans import Attributes
from prefill_node.pending_prefills import Leases, PendingPrefill
from prefill_node.prefill_trace import PrefillTrace


class DecodeStream:
    """What comes of an engine's batch, or of a message, is in the writer when the callback that brought it returns.

    A D that does not read: its messages are not read either while many events wait for it, so that at most those of the
    prompts that the engine has accepted are added, a few each.
    """

    def __init__(self, node: NodeContext, leases: Leases, ahead: int, on_end: Callable[[], None]) -> None:
        """Prompts go ahead of D by ``ahead`` tokens at most. ``on_end`` is called when one is not computed any more."""
        self.writer = StreamWriter(pb.PrefillEvents)
        self.prefills: dict[int, PendingPrefill] = {}  # by D's number, until their leases have ended
        self._node = node
        self._leases = leases
        self._ahead = ahead
        self._on_end = on_end

    async def read(self, requests: AsyncIterable[pb.HandoffRequest]) -> None:
        """Obey until D ends the stream. Raises RequestError when D breaks the protocol."""
        async for message in requests:
            match message.WhichOneof("kind"):
                case "prefill":
                    self._prefill(message.prefill)
                case "extend":
                    self._extend(message.extend)
                case "release":
                    self._release(message.release)
                case "cancel":
                    prefill = self.prefills.pop(message.cancel.request, None)
                    if prefill is not None:
                        prefill.hang_up()
                        self._on_end()
                case _:
                    raise RequestError("a HandoffRequest asks for nothing known; use the same version everywhere")
            await self.writer.room()

    def hang_up(self) -> None:
        """The stream has ended: nobody waits for its prompts. What was announced stays leased."""
        for prefill in self.prefills.values():
            prefill.hang_up()
        self.prefills.clear()

    def fail(self, error: PdserveError) -> None:
        """Compute no more of its prompts. What was announced stays leased."""
        for number, prefill in tuple(self.prefills.items()):
            prefill.hang_up()
            self.end(number, None if prefill.complete else error)

    def add(self, event: pb.PrefillEvent) -> None:
        """At the end of what is sent next."""
        self.writer.put().events.append(event)

    def end(self, number: int, error: PdserveError | None) -> None:
        """Nothing more becomes of a prompt; with an error, D is told."""
        self.prefills.pop(number, None)
        if error is not None:
            self.add(pb.PrefillEvent(request=number, failed=failure_to_pb(error)))
        self._on_end()

    def _prefill(self, request: pb.PrefillRequest) -> None:
        number = request.request
        if number in self.prefills:
            raise RequestError(f"prompt {number} is computed for this stream already; number them uniquely")
        try:
            prefill = self._admit(request)
        except PdserveError as exc:
            self.end(number, exc)
            return
        self.prefills[number] = prefill
        accepted = pb.Accepted(lease=prefill.rid)
        self.add(pb.PrefillEvent(request=number, accepted=accepted))

    def _admit(self, request: pb.PrefillRequest) -> PendingPrefill:
        node = self._node
        node.check_ready()
        if request.epoch != node.epoch:
            raise PeerError(
                f"epoch {request.epoch or '(none)'} is not that of {node.node_id}, which is {node.epoch}; "
                "shake hands again"
            )
        tokens, sampling = unpack_tokens(request.token_ids), sampling_from_pb(request.sampling)
        check_request(tokens, sampling, node.config)
        check_skip(request.skip_tokens, len(tokens), node.config.kv_layout.block_size)
        answers = _Answers(self, request.request, int(self._leases.table.seconds * 1000))
        timeout, course = request.timeout_ms / 1000, self._course(request, len(tokens))
        prefill = PendingPrefill(node.engine, self._leases, len(tokens), timeout, answers, course)
        prefill.submit(
            request.token_ids, sampling, request.cache_salt, request.priority, request.skip_tokens, self._ahead
        )
        return prefill

    def _course(self, request: pb.PrefillRequest, num_tokens: int) -> PrefillTrace:
        attributes: Attributes = {"pdserve.request_id": request.request_id, "gen_ai.usage.input_tokens": num_tokens}
        span = self._node.tracer.continue_span("prefill node", request.traceparent, request.tracestate, attributes)
        return PrefillTrace(request.request_id, num_tokens, span, self._node.log_requests)

    def _extend(self, request: pb.ExtendRequest) -> None:
        seconds = self._leases.extend(request.epoch, request.lease)
        self.add(
            pb.PrefillEvent(
                request=request.request, extended=pb.Extended(ask=request.ask, lease_ms=int(seconds * 1000))
            )
        )

    def _release(self, request: pb.ReleaseRequest) -> None:
        def release() -> None:
            stood = self._leases.release(request.epoch, request.lease)
            self.add(pb.PrefillEvent(request=request.request, released=pb.Released(stood=stood)))

        prefill = self.prefills.get(request.request)
        if prefill is not None and prefill.rid == request.lease:
            prefill.settle(release)
        else:
            release()


class _Answers:
    """To one prompt: a Listener of it. ``number`` is D's."""

    def __init__(self, stream: DecodeStream, number: int, lease_ms: int) -> None:
        self._stream = stream
        self._number = number
        self._lease_ms = lease_ms

    def on_part(self, prefill: PendingPrefill, part: Leased) -> None:
        if prefill.complete:
            self._add(first_tokens=_first_tokens(prefill))
        ready = pb.KVReady(
            lease=part.rid,
            lease_ms=self._lease_ms,
            block_ids=part.block_ids,
            num_tokens=part.num_tokens,
            digests=part.digests,
        )
        self._add(kv_ready=ready)
        if prefill.complete:
            self._add(finished=pb.Finished())

    def on_token(self, sample: Sample) -> None:
        self._add(next_token=_sampled_token(sample))

    def on_end(self, error: PdserveError | None) -> None:
        self._stream.end(self._number, error)

    def _add(self, **kind: Any) -> None:
        self._stream.add(pb.PrefillEvent(request=self._number, **kind))


def _first_tokens(prefill: PendingPrefill) -> pb.FirstTokens:
    choices = map(_sampled_token, prefill.samples)
    return pb.FirstTokens(choices=choices, cached_tokens=prefill.cached_tokens, queued_ms=prefill.queued * 1000)


def _sampled_token(sample: Sample) -> pb.SampledToken:
    logprobs = logprobs_to_pb(sample.logprobs) if sample.logprobs else None
    return pb.SampledToken(token_id=sample.token_id, logprobs=logprobs)
