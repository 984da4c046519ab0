"""The stream of one reader: its messages become prompts and leases, and their results become events.

Readers are decode nodes, and all nodes that pull.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable

from node.context import NodeContext
from node.leasing.leases import LeaseId
from node.leasing.prompt_trace import PromptTrace
from node.leasing.prompts import CachedPrompt, LeasedPrompts, StartPrefill
from node.request_checks import check_images, check_request, check_skip
from node.streams.served_streams import ServedStream
from pdserve.errors import PdserveError, PeerError, RequestError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.errors import failure_to_pb
from pdserve.rpc.field_ranges import check_message
from pdserve.rpc.protobuf import sampling_from_pb
from pdserve.tracing.spans import Attributes

_log = logging.getLogger(__name__)


class ReaderStream(ServedStream[pb.HandoffRequest, pb.PrefillEvents]):
    """The prompts of one reader.

    While too many events wait for a slow reader, ``read`` waits, too: only accepted prompts add a few events each.
    """

    def __init__(
        self, number: int, node: NodeContext, prompts: LeasedPrompts, *, start_prefill: StartPrefill | None, peer: str
    ) -> None:
        """``number`` distinguishes this stream's leases from other streams' leases; ``peer`` is for the log.

        Without ``start_prefill`` this node computes no prompts of peers.
        """
        super().__init__(pb.PrefillEvents)
        self._number = number
        self._peer = peer
        self._node = node
        self._prompts = prompts
        self._start_prefill = start_prefill

    async def read(self, requests: AsyncIterable[pb.HandoffRequest]) -> None:
        async for message in requests:
            match message.WhichOneof("kind"):
                case "prefill":
                    self._prefill(message.prefill)
                case "extend":
                    self._extend(message.extend)
                case "release":
                    self._release(message.release.request)
                case _:
                    raise RequestError("a HandoffRequest is of no known kind; use the same version everywhere")
            await self.writer.room()

    @property
    def idle(self) -> bool:
        return self.writer.empty

    def close(self) -> None:
        """Cancel all prompts, as the stream has ended. Announced blocks stay leased."""
        cancelled = 0
        for prompt in self._prompts.of_stream(self._number):
            prompt.cancel()
            cancelled += 1
        if cancelled:
            text = "the stream of %s ended; its %d prompts without a Release are cancelled"
            _log.info(text, self._peer, cancelled)

    def fail(self, error: PdserveError) -> None:
        """Fail all prompts that are not computed. Announced blocks stay leased."""
        for prompt in self._prompts.of_stream(self._number):
            if prompt.complete:
                prompt.cancel()
            else:
                prompt.fail(error)

    def _send(self, event: pb.PrefillEvent) -> None:
        self.writer.put(event.ByteSize()).events.append(event)

    def _prefill(self, request: pb.PrefillRequest) -> None:
        """Begin a prompt, or answer why not. Raises RequestError for a number that is in use."""
        number = request.request
        if self._prompts.table.get(LeaseId(self._number, number)) is not None:
            raise RequestError(f"prompt {number} is computed for this stream already; number them uniquely")
        self.add_number(number)
        try:
            self._begin(request)
        except PdserveError as exc:
            self._send(pb.PrefillEvent(request=number, failed=failure_to_pb(exc)))
        else:
            self._send(pb.PrefillEvent(request=number, accepted=pb.Accepted()))

    def _begin(self, request: pb.PrefillRequest) -> None:
        """Raises PdserveError for a prompt that cannot be computed."""
        node = self._node
        node.check_ready()
        if request.epoch != node.epoch:
            text = f"epoch {request.epoch or '(none)'} is not that of {node.node_id}, which is {node.epoch}"
            raise PeerError(f"{text}; repeat the handshake")
        if self._start_prefill is None and not request.cached_only:
            raise PeerError(f"{node.name} leases cached KV only; name a prefill node to compute a prompt")
        check_message(request)
        sampling = sampling_from_pb(request.sampling)
        num_tokens = check_request(request.token_ids, sampling, node.config)
        check_skip(request.skip_tokens, num_tokens, node.config.kv_layout.block_size)
        check_images(request.images, request.token_ids, node.config, last_text=0 if request.cached_only else 1)
        lease = LeaseId(self._number, request.request)
        trace = self._begin_trace(request, num_tokens)
        if request.cached_only:
            CachedPrompt(lease, self._prompts, trace=trace, send=self._send).submit(request)
        else:
            assert self._start_prefill is not None
            self._start_prefill(self._prompts, lease, request, sampling, trace=trace, send=self._send)

    def _begin_trace(self, request: pb.PrefillRequest, num_tokens: int) -> PromptTrace:
        attributes: Attributes = {"pdserve.request_id": request.request_id, "gen_ai.usage.input_tokens": num_tokens}
        span = self._node.tracer.continue_span("prefill node", request.traceparent, request.tracestate, attributes)
        return PromptTrace(request.request_id, num_tokens, span, log=self._node.log_requests)

    def _extend(self, request: pb.ExtendRequest) -> None:
        self.check_number(request.request)
        seconds = self._prompts.extend(LeaseId(self._number, request.request))
        extended = pb.Extended(ask=request.ask, lease_ms=int(seconds * 1000))
        self._send(pb.PrefillEvent(request=request.request, extended=extended))

    def _release(self, number: int) -> None:
        self.check_number(number)
        lease = LeaseId(self._number, number)

        def release() -> None:
            released = pb.Released(stood=self._prompts.release(lease))
            self._send(pb.PrefillEvent(request=number, released=released))

        self._prompts.after_step(lease, release)
