"""The PrefillNode service: translates calls into prefills and leases, and nothing else."""

from __future__ import annotations

import logging
from typing import Any

import grpc

from engine.admission import check_request, check_skip
from engine.messages import Leased
from engine.node import Node
from pdserve.compat import PROTOCOL_VERSION, differences
from pdserve.errors import PdserveError, PeerError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc import abort
from pdserve.wire import logprobs_to_pb, rank_to_pb, sampling_from_pb, unpack_tokens
from prefill_node.prefills import Leases, PendingPrefill

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillService(pb_grpc.PrefillNodeServicer):
    def __init__(self, node: Node, leases: Leases) -> None:
        self._node = node
        self._leases = leases

    async def Handshake(self, request: pb.HandshakeRequest, context: Context) -> pb.HandshakeReply:
        try:
            self._node.check_ready()
            self._check_compatible(request)
        except PdserveError as exc:
            await abort(context, exc)
        _log.info("handshake with decode node %s (epoch %s)", request.node_id, request.epoch)
        return pb.HandshakeReply(
            node_id=self._node.node_id,
            epoch=self._node.epoch,
            ranks=[rank_to_pb(rank) for rank in self._node.link.ranks],
        )

    async def Prefill(  # type: ignore[override]  # it writes to its context: a generator is not told of a cancelled call
        self, request: pb.PrefillRequest, context: Context
    ) -> None:
        try:
            prefill = self._admit(request)
            try:
                await self._serve(prefill, context)
            except BaseException:  # the caller is gone, its lease has ended, or the engine has refused
                prefill.hang_up()
                raise
        except PdserveError as exc:
            await abort(context, exc)

    async def Extend(self, request: pb.ExtendRequest, context: Context) -> pb.ExtendReply:
        return pb.ExtendReply(lease_ms=int(self._leases.extend(request.epoch, request.lease) * 1000))

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:
        return pb.ReleaseReply(stood=self._leases.release(request.epoch, request.lease))

    def _admit(self, request: pb.PrefillRequest) -> PendingPrefill:
        self._node.check_ready()
        if request.epoch != self._node.epoch:
            raise PeerError(
                f"epoch {request.epoch or '(none)'} is not that of {self._node.node_id}, which is {self._node.epoch}; "
                "shake hands again"
            )
        tokens, sampling = unpack_tokens(request.token_ids), sampling_from_pb(request.sampling)
        check_request(tokens, sampling, self._node.config)
        check_skip(request.skip_tokens, len(tokens), self._node.config.kv_layout.block_size)
        prefill = PendingPrefill(self._node.link, self._leases, len(tokens))
        prefill.submit(request.token_ids, sampling, request.cache_salt, request.skip_tokens)
        return prefill

    async def _serve(self, prefill: PendingPrefill, context: Context) -> None:
        accepted = pb.Accepted(queue_position=self._node.link.status.waiting, lease=prefill.rid)
        await context.write(pb.PrefillEvent(accepted=accepted))
        part = await prefill.next_part()
        while part.num_tokens < prefill.num_tokens:
            await context.write(pb.PrefillEvent(kv_ready=self._ready(part)))
            part = await prefill.next_part()
        await context.write(pb.PrefillEvent(first_tokens=_first_tokens(prefill)))
        await context.write(pb.PrefillEvent(kv_ready=self._ready(part)))

    def _ready(self, part: Leased) -> pb.KVReady:
        return pb.KVReady(
            lease=part.rid,
            lease_ms=int(self._leases.table.seconds * 1000),
            block_ids=part.block_ids,
            num_tokens=part.num_tokens,
            digests=part.digests,
        )

    def _check_compatible(self, request: pb.HandshakeRequest) -> None:
        if request.protocol != PROTOCOL_VERSION:
            raise PeerError(
                f"protocol {request.protocol} of {request.node_id} is not {PROTOCOL_VERSION}; "
                "run the same version of pdserve on both"
            )
        if request.compat_hash != self._node.compat_hash:
            found = differences(self._node.config.compat_fields, dict(request.compat_fields))
            raise PeerError(
                f"{request.node_id} cannot read KV of {self._node.node_id}: {found or 'compatibility hashes differ'}; "
                "serve the same checkpoint with the same flags on both"
            )


def _first_tokens(prefill: PendingPrefill) -> pb.FirstTokens:
    return pb.FirstTokens(
        choices=[
            pb.FirstToken(
                token_id=sample.token_id, logprobs=logprobs_to_pb(sample.logprobs) if sample.logprobs else None
            )
            for sample in prefill.samples
        ],
        cached_tokens=prefill.cached_tokens,
    )
