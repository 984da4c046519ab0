"""The decode role: connections to prefill nodes, handoffs, and the DecodeNode service."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Annotated

import grpc
import msgspec
from prometheus_client.metrics_core import Metric

from decode_node.decode_metrics import DecodeMetrics
from decode_node.decode_service import DecodeService
from decode_node.handoff_driver import Handoffs
from decode_node.handoff_policy import FailurePolicy, HandoffPolicy
from node.context import NodeContext
from node.drain import Drainable
from node.reading.peers import KVPeers
from node.reading.reading_metrics import ReadingMetrics
from pdserve.discovery.sources import ADDRESS_FORMS, check_source
from pdserve.flags import declaration
from pdserve.flags.declaration import Flag
from pdserve.flags.shared import DAY
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.transports import REQUIRABLE


class DecodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that only decode nodes have, with their flags."""

    prefill: Annotated[
        tuple[str, ...],
        Flag(
            f"prefill nodes: {ADDRESS_FORMS}; repeatable",
            metavar="SOURCE",
            parse=check_source,
            repeatable=True,
            group="handoff",
        ),
    ] = ()
    failure_policy: Annotated[
        str,
        Flag(
            "when a handoff fails: prefill on this node, or fail the request",
            spelling="--kv-failure-policy",
            choices=tuple(policy.value for policy in FailurePolicy),
            group="handoff",
        ),
    ] = FailurePolicy.RECOMPUTE.value
    handoff_min_tokens: Annotated[
        int,
        Flag(
            "prefill prompts on this node that lack KV of fewer tokens; 0 hands all off",
            metavar="N",
            at_least=0,
            group="handoff",
        ),
    ] = 32
    require_transport: Annotated[
        str,
        Flag(
            "refuse connections to prefill nodes that are slower than KIND: shm (memory shared by processes of a "
            "host: UCX's cma, sysv, posix, xpmem, knem; not for KV on GPUs), rdma (network cards with remote DMA: rc, "
            "dc, ud, srd, gga) or nvlink (between GPUs of a host: cuda_ipc). Each accepts the kinds after it; plain "
            "TCP satisfies none. Judged by the lanes that UCX chose, not by their speed",
            metavar="KIND",
            choices=REQUIRABLE,
            unset="any, with a warning for TCP",
            group="handoff",
        ),
    ] = ""
    peer_wait: Annotated[
        float,
        Flag(
            "longest wait for a first prefill node before the node is ready without one",
            metavar="S",
            at_least=0,
            at_most=DAY,
            group="handoff",
        ),
    ] = 60.0


class DecodeRole:
    name = "decode"
    services: tuple[str, ...] = ("pdserve.v1.DecodeNode",)

    def __init__(self, settings: DecodeSettings) -> None:
        self.uses_connector = bool(settings.prefill)
        self.hands_off_all = settings.handoff_min_tokens == 0
        self._settings = settings
        self._metrics: DecodeMetrics
        self._reading = ReadingMetrics()
        self._peers: KVPeers | None = None

    def attach(self, node: NodeContext, server: grpc.aio.Server) -> Drainable:
        self._metrics = DecodeMetrics(node.config.served_model_name)
        self._peers = KVPeers(
            node,
            self._reading,
            sources=self._settings.prefill,
            required_transport=self._settings.require_transport,
        )
        failure_policy = FailurePolicy(self._settings.failure_policy)
        policy = HandoffPolicy(self._metrics, self._settings.handoff_min_tokens, failure_policy)
        handoffs = Handoffs(node, self._peers, self._metrics, policy)
        service = DecodeService(node, handoffs)
        pb_grpc.add_DecodeNodeServicer_to_server(service, server)
        return service

    async def connect(self) -> None:
        if self._peers is not None:
            await self._peers.start(self._settings.peer_wait)

    def drop_peers(self, reason: str) -> None:
        if self._peers is not None:
            self._peers.drop(reason)

    def connected_peers(self) -> Sequence[str]:
        return self._peers.connected_ids() if self._peers is not None else ()

    def metrics(self) -> Iterable[Metric]:
        return chain(self._metrics.collect(), self._reading.collect())

    async def close(self) -> None:
        if self._peers is not None:
            await self._peers.close()


def add_flags(parser: argparse.ArgumentParser) -> None:
    declaration.add_flags(parser, DecodeSettings)


def make_role(args: argparse.Namespace) -> DecodeRole:
    return DecodeRole(declaration.options_from(DecodeSettings, args))
