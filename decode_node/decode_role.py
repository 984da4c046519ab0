"""The decode role: handoffs and the DecodeNode service, and leases of this node's cached blocks."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import chain

import grpc
from prometheus_client.metrics_core import Metric

from decode_node.decode_flags import DecodeSettings, FailurePolicy
from decode_node.decode_metrics import DecodeMetrics
from decode_node.decode_service import DecodeService
from decode_node.handoff_driver import Handoffs
from decode_node.handoff_policy import HandoffPolicy
from node.context import NodeContext
from node.drain import Drainable, SeveralServices
from node.leasing.lease_settings import LeaseSettings
from node.leasing.leasing import LEASING_SERVICE, Leasing
from node.reading.peers import KVPeers
from node.reading.read_settings import ReadSettings
from node.reading.reading import Reading
from pdserve.flags.declaration import options_from
from pdserve.pb import pdserve_pb2_grpc as pb_grpc

DECODE_SERVICE = "pdserve.v1.DecodeNode"


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


def make_role(args: argparse.Namespace) -> DecodeRole:
    settings = options_from(DecodeSettings, args)
    reading = Reading(options_from(ReadSettings, args), settings.prefill)
    return DecodeRole(settings, reading, Leasing(options_from(LeaseSettings, args)))
