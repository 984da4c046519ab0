"""The PrefillNode service: handshakes and one stream per decode node."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable
from itertools import count

from node.context import NodeContext
from node.leasing.prefills import Prefills
from node.leasing.reader_stream import ReaderStream
from node.served_streams import ServedStreams
from node.stream_writer import Context
from pdserve.config.compatibility import SPOKEN_PROTOCOLS, describe_window, differences
from pdserve.errors import Draining, PdserveError, PeerError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.errors import abort
from pdserve.rpc.protobuf import rank_to_pb

_log = logging.getLogger(__name__)


class PrefillService(pb_grpc.PrefillNodeServicer):
    def __init__(self, node: NodeContext, prefills: Prefills, decode_ahead: int) -> None:
        self._node = node
        self._prefills = prefills
        self._decode_ahead = decode_ahead
        self._streams: ServedStreams[ReaderStream] = ServedStreams(node.violations)
        self._numbers = count(1)  # of streams
        self.release_timeout = prefills.table.seconds + prefills.table.guard
        prefills.on_change = self._streams.changed

    async def finish(self) -> None:
        self._streams.drain()
        await self._streams.until(lambda: self._prefills.idle)

    def hand_over(self, why: Draining) -> None:
        """Fail the prompts that are not computed, for decode nodes to send elsewhere. Announced blocks stay leased."""
        self._streams.drain()
        for stream in self._streams:
            stream.fail(why)

    def reopen(self) -> None:
        self._streams.reopen()

    async def wait_released(self) -> None:
        await self._streams.until(lambda: self._prefills.idle)
        await self._streams.ended()

    async def Handshake(self, request: pb.HandshakeRequest, context: Context) -> pb.HandshakeReply:
        try:
            self._node.check_ready()
            self._check_compatible(request)
        except PdserveError as exc:
            await abort(context, exc)
        line = "handshake with decode node %s (epoch %s), protocol %d"
        _log.info(line, request.node_id, request.epoch, request.protocol)
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
            self._prefills,
            decode_ahead=self._decode_ahead,
            peer=context.peer(),
        )
        await self._streams.serve(stream, request_iterator, context)

    def _check_compatible(self, request: pb.HandshakeRequest) -> None:
        if request.protocol not in SPOKEN_PROTOCOLS:
            raise PeerError(
                f"{request.node_id} cannot read from {self._node.node_id}: {describe_window(request.protocol)}"
            )
        if request.compat_hash != self._node.compat_hash:
            found = differences(self._node.config.compat_fields, dict(request.compat_fields))
            raise PeerError(
                f"{request.node_id} cannot read KV of {self._node.node_id}: {found or 'compatibility hashes differ'}; "
                "serve the same checkpoint with the same flags on both"
            )
