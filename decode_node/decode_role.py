"""The decode role: handoffs and the DecodeNode service, and leases of this node's cached blocks."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
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
from node.leasing.prompts import StartPrefill
from node.reading.peers import KVPeers
from node.reading.read_settings import ReadSettings
from node.reading.reading import Reading
from node.role import PeerRole
from pdserve.flags.declaration import options_from
from pdserve.pb import pdserve_pb2_grpc as pb_grpc

DECODE_SERVICE = "pdserve.v1.DecodeNode"


class DecodeRole(PeerRole):
    """A node that reads from peers leases them its cached blocks."""

    name = "decode"

    def __init__(self, settings: DecodeSettings, reading: Reading, leasing: Leasing | None) -> None:
        super().__init__(reading, leasing, settings.peer_wait)
        self.uses_connector = reading.reads
        self.hands_off_all = settings.handoff_min_tokens == 0
        self.services: tuple[str, ...] = (DECODE_SERVICE,) if leasing is None else (DECODE_SERVICE, LEASING_SERVICE)
        self._settings = settings
        self._metrics: DecodeMetrics  # once attached

    def attach(self, node: NodeContext, server: grpc.aio.Server) -> Drainable:
        self._metrics = DecodeMetrics(node.config.served_model_name)
        failure_policy = FailurePolicy(self._settings.failure_policy)
        policy = HandoffPolicy(self._metrics, self._settings.handoff_min_tokens, failure_policy)
        peers = self._reading.attach(node)
        service = DecodeService(node, Handoffs(node, peers, self._metrics, policy))
        pb_grpc.add_DecodeNodeServicer_to_server(service, server)
        if self._leasing is None:
            return service
        return SeveralServices(service, self._leasing.attach(node, server, self._prefills(node, peers)))

    def _prefills(self, node: NodeContext, peers: KVPeers) -> StartPrefill | None:
        """Return what computes prompts of peers; None: only cached blocks are leased."""
        return None

    def metrics(self) -> Iterable[Metric]:
        return chain(self._metrics.collect(), super().metrics())


def make_role(args: argparse.Namespace) -> DecodeRole:
    settings = options_from(DecodeSettings, args)
    reading = Reading(options_from(ReadSettings, args), settings.prefill)
    leasing = Leasing(options_from(LeaseSettings, args)) if reading.reads else None
    return DecodeRole(settings, reading, leasing)
