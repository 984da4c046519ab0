"""The PrefillNode service: handshakes and one stream per reader."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable
from itertools import count

from node.context import NodeContext
from node.leasing.prompts import LeasedPrompts, StartPrefill
from node.leasing.reader_stream import ReaderStream
from node.streams.served_streams import ServedStreams
from node.streams.stream_writer import Context
from pdserve.config.compatibility import PROTOCOL_VERSION, describe_protocol, differences
from pdserve.errors import Draining, PdserveError, PeerError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.errors import abort
from pdserve.rpc.protobuf import rank_to_pb

_log = logging.getLogger(__name__)


class PrefillService(pb_grpc.PrefillNodeServicer):
    def __init__(self, node: NodeContext, prompts: LeasedPrompts, start_prefill: StartPrefill | None) -> None:
        """Without ``start_prefill``, only cached blocks are leased."""
        self._node = node
        self._prompts = prompts
        self._start_prefill = start_prefill
        self._streams: ServedStreams[ReaderStream] = ServedStreams(node.violations)
        self._numbers = count(1)  # stream numbers
        self.release_timeout = prompts.table.seconds + prompts.table.guard
        prompts.on_change = self._streams.changed

    async def finish(self) -> None:
        self._streams.drain()
        await self._streams.until(lambda: self._prompts.idle)

    def hand_over(self, why: Draining) -> None:
        """Fail the prompts that are not computed, for readers to send elsewhere. Announced blocks stay leased."""
        self._streams.drain()
        for stream in self._streams:
            stream.fail(why)

    def reopen(self) -> None:
        self._streams.reopen()

    async def wait_released(self) -> None:
        await self._streams.until(lambda: self._prompts.idle)
        await self._streams.ended()

    async def Handshake(self, request: pb.HandshakeRequest, context: Context) -> pb.HandshakeReply:
        try:
            self._node.check_ready()
            self._check_compatible(request)
        except PdserveError as exc:
            await abort(context, exc)
        line = "handshake with %s (epoch %s)"
        _log.info(line, request.node_id, request.epoch)
        return pb.HandshakeReply(
            node_id=self._node.node_id,
            epoch=self._node.epoch,
            ranks=[rank_to_pb(rank) for rank in self._node.engine.ranks],
            drafts=self._node.config.drafts_by,
        )

    async def Serve(  # type: ignore[override]  # not a generator, which would not notice a broken stream
        self, request_iterator: AsyncIterable[pb.HandoffRequest], context: Context
    ) -> None:
        stream = ReaderStream(
            next(self._numbers),
            self._node,
            self._prompts,
            start_prefill=self._start_prefill,
            peer=context.peer(),
        )
        await self._streams.serve(stream, request_iterator, context)

    def _check_compatible(self, request: pb.HandshakeRequest) -> None:
        if request.protocol != PROTOCOL_VERSION:
            raise PeerError(
                f"{request.node_id} cannot read from {self._node.node_id}: {describe_protocol(request.protocol)}"
            )
        if request.compat_hash != self._node.compat_hash:
            reason = differences(self._node.config.compat_fields, dict(request.compat_fields))
            raise PeerError(
                f"{request.node_id} cannot read KV of {self._node.node_id}: {reason or 'compatibility hashes differ'}; "
                "serve the same checkpoint with the same flags on both"
            )
