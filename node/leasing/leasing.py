"""The part of a node that leases KV to peers: the PrefillNode service and its metrics."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import grpc
from prometheus_client.metrics_core import Metric

from node.context import NodeContext
from node.drain import Drainable
from node.leasing.lease_settings import LeaseSettings
from node.leasing.leases import LeaseState
from node.leasing.prefill_service import PrefillService
from node.leasing.prompts import LeasedPrompts, StartPrefill
from pdserve.metrics import MetricSet
from pdserve.pb import pdserve_pb2_grpc as pb_grpc

LEASING_SERVICE = "pdserve.v1.PrefillNode"


class Leasing:
    """Does nothing before ``attach``: a node without connector leases nothing."""

    def __init__(self, settings: LeaseSettings) -> None:
        self._settings = settings
        self._prompts: LeasedPrompts | None = None
        self._metrics = MetricSet()
        for state in LeaseState:
            read = partial(self._count_of, state)
            self._metrics.read_counter(f"pdserve_leases_{state}", f"Leases {state}.", read)

    def attach(self, node: NodeContext, server: grpc.aio.Server, start_prefill: StartPrefill | None) -> Drainable:
        """Serve peers. Without ``start_prefill``, only cached blocks are leased."""
        self._prompts = LeasedPrompts(node.engine, self._settings.lease_seconds, self._settings.lease_guard)
        service = PrefillService(node, self._prompts, start_prefill)
        pb_grpc.add_PrefillNodeServicer_to_server(service, server)
        return service

    def drop(self) -> None:
        """End all leases; peers connect again by themselves."""
        if self._prompts is not None:
            self._prompts.end_all()

    def metrics(self) -> Iterable[Metric]:
        return self._metrics.collect()

    def close(self) -> None:
        if self._prompts is not None:
            self._prompts.close()

    def _count_of(self, state: LeaseState) -> int:
        return 0 if self._prompts is None else self._prompts.table.counts[state]
