"""The stream of one decode node on P: its messages become prompts and leases, and their results become events."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable
from functools import partial
from typing import Any

from node.context import NodeContext
from node.request_checks import check_request, check_skip
from node.stream_writer import StreamWriter
from pdserve.errors import PdserveError, PeerError, RequestError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.errors import failure_to_pb
from pdserve.rpc.protobuf import sampling_from_pb, unpack_tokens
from pdserve.tracing.spans import Attributes
from prefill_node.lease_manager import LeaseManager
from prefill_node.leases import LeaseId
from prefill_node.pending_prefill import PendingPrefill
from prefill_node.prefill_trace import PrefillTrace


class DecodeStream:
    """The prompts of one decode node. Each event is in ``writer`` when the callback that causes it returns.

    While too many events wait for a slow D, ``read`` waits too, so that only accepted prompts add a few events each.
    """

    def __init__(
        self, number: int, node: NodeContext, leases: LeaseManager, decode_ahead: int, on_change: Callable[[], None]
    ) -> None:
        """``number`` tells this stream's leases from those of all other streams of this node.

        Decode at most ``decode_ahead`` tokens after a prompt's first; call ``on_change`` after each prompt's end.
        """
        self.writer = StreamWriter(pb.PrefillEvents)
        self.prefills: dict[int, PendingPrefill] = {}  # by D's number, until their leases end
        self._number = number
        self._largest = -1  # D's largest number of a prompt so far
        self._node = node
        self._leases = leases
        self._decode_ahead = decode_ahead
        self._on_change = on_change

    async def read(self, requests: AsyncIterable[pb.HandoffRequest]) -> None:
        """Handle messages until D ends the stream. Raises RequestError for a protocol violation."""
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

    def close(self) -> None:
        """Cancel all prompts, as the stream has ended. Announced blocks stay leased."""
        for prefill in self.prefills.values():
            prefill.cancel()
        self.prefills.clear()

    def fail(self, error: PdserveError) -> None:
        """Fail all prompts that are not computed. Announced blocks stay leased."""
        for number, prefill in tuple(self.prefills.items()):
            prefill.cancel()
            self.end(number, None if prefill.complete else error)

    def send(self, number: int, **kind: Any) -> None:
        """Queue an event of prompt ``number``; ``kind`` is the field that is set."""
        event = pb.PrefillEvent(request=number, **kind)
        self.writer.put(event.ByteSize()).events.append(event)

    def end(self, number: int, error: PdserveError | None) -> None:
        """Forget a prompt; send the error, if any."""
        self.prefills.pop(number, None)
        if error is not None:
            self.send(number, failed=failure_to_pb(error))
        self._on_change()

    def _prefill(self, request: pb.PrefillRequest) -> None:
        number = request.request
        if LeaseId(self._number, number) in self._leases.table:
            raise RequestError(f"prompt {number} is computed for this stream already; number them uniquely")
        self._largest = max(self._largest, number)
        try:
            prefill = self._submit(request)
        except PdserveError as exc:
            self.end(number, exc)
            return
        self.prefills[number] = prefill
        self.send(number, accepted=pb.Accepted())

    def _submit(self, request: pb.PrefillRequest) -> PendingPrefill:
        node = self._node
        node.check_ready()
        if request.epoch != node.epoch:
            raise PeerError(
                f"epoch {request.epoch or '(none)'} is not that of {node.node_id}, which is {node.epoch}; "
                "repeat the handshake"
            )
        tokens, sampling = unpack_tokens(request.token_ids), sampling_from_pb(request.sampling)
        check_request(tokens, sampling, node.config)
        check_skip(request.skip_tokens, len(tokens), node.config.kv_layout.block_size)
        prefill = PendingPrefill(
            *(node.engine, self._leases, LeaseId(self._number, request.request)),
            *(len(tokens), request.timeout_ms / 1000),
            *(partial(self.send, request.request), partial(self.end, request.request)),
            self._begin_trace(request, len(tokens)),
        )
        prefill.submit(request, sampling, self._decode_ahead)
        return prefill

    def _begin_trace(self, request: pb.PrefillRequest, num_tokens: int) -> PrefillTrace:
        attributes: Attributes = {"pdserve.request_id": request.request_id, "gen_ai.usage.input_tokens": num_tokens}
        span = self._node.tracer.continue_span("prefill node", request.traceparent, request.tracestate, attributes)
        return PrefillTrace(request.request_id, num_tokens, span, self._node.log_requests)

    def _extend(self, request: pb.ExtendRequest) -> None:
        seconds = self._leases.extend(self._lease(request.request))
        self.send(request.request, extended=pb.Extended(ask=request.ask, lease_ms=int(seconds * 1000)))

    def _release(self, number: int) -> None:
        lease = self._lease(number)

        def release() -> None:
            self.send(number, released=pb.Released(stood=self._leases.release(lease)))

        prefill = self.prefills.get(number)
        if prefill is not None:
            prefill.after_step(release)
        else:
            release()

    def _lease(self, number: int) -> LeaseId:
        """Return the lease of a prompt on this stream. Raises RequestError for a prompt that was never sent on it."""
        if number > self._largest:
            raise RequestError(
                f"prompt {number} was never sent on this stream; only its own stream can extend or end it"
            )
        return LeaseId(self._number, number)
