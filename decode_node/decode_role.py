"""The decode role: handoffs and the DecodeNode service, and leases of what this node has cached."""

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
from node.drain import Drainable, SeveralServices
from node.leasing.leasing import LEASING_SERVICE, LeaseSettings, Leasing
from node.reading.peers import KVPeers
from node.reading.reading import Reading, ReadSettings
from pdserve.discovery.sources import ADDRESS_FORMS, check_source
from pdserve.flags import declaration
from pdserve.flags.declaration import Flag
from pdserve.flags.shared import DAY
from pdserve.pb import pdserve_pb2_grpc as pb_grpc

DECODE_SERVICE = "pdserve.v1.DecodeNode"


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

    def __init__(self, settings: DecodeSettings, reading: Reading, leasing: Leasing | None) -> None:
        """Without ``leasing``, another role of this node leases."""
        self.uses_connector = reading.reads
        self.hands_off_all = settings.handoff_min_tokens == 0
        self._settings = settings
        self._reading = reading
        self._leasing = leasing if reading.reads else None
        self.leases_cache = self._leasing is not None
        self.services: tuple[str, ...] = (DECODE_SERVICE, *([LEASING_SERVICE] if self.leases_cache else []))
        self.peers: KVPeers  # once attached
        self._metrics: DecodeMetrics

    def attach(self, node: NodeContext, server: grpc.aio.Server) -> Drainable:
        self._metrics = DecodeMetrics(node.config.served_model_name)
        failure_policy = FailurePolicy(self._settings.failure_policy)
        policy = HandoffPolicy(self._metrics, self._settings.handoff_min_tokens, failure_policy)
        self.peers = self._reading.attach(node)
        handoffs = Handoffs(node, self.peers, self._metrics, policy)
        service = DecodeService(node, handoffs)
        pb_grpc.add_DecodeNodeServicer_to_server(service, server)
        if self._leasing is None:
            return service
        return SeveralServices(service, self._leasing.attach(node, server, start_prefill=None))

    async def connect(self) -> None:
        await self._reading.connect(self._settings.peer_wait)

    def drop_peers(self, reason: str) -> None:
        if self._leasing is not None:
            self._leasing.drop()
        self._reading.drop(reason)

    def connected_peers(self) -> Sequence[str]:
        return self._reading.connected_ids()

    def metrics(self) -> Iterable[Metric]:
        leases = self._leasing.metrics() if self._leasing is not None else ()
        return chain(self._metrics.collect(), self._reading.metrics(), leases)

    async def close(self) -> None:
        if self._leasing is not None:
            self._leasing.close()
        await self._reading.close()


def add_flags(parser: argparse.ArgumentParser) -> None:
    for settings in (DecodeSettings, ReadSettings, LeaseSettings):
        declaration.add_flags(parser, settings)


def make_role(args: argparse.Namespace) -> DecodeRole:
    settings = declaration.options_from(DecodeSettings, args)
    reading = Reading(declaration.options_from(ReadSettings, args), settings.prefill)
    return DecodeRole(settings, reading, Leasing(declaration.options_from(LeaseSettings, args)))
