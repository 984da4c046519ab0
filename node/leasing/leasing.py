"""The part of a node that leases KV to peers: its flags, the PrefillNode service, its metrics."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Annotated

import grpc
import msgspec
from prometheus_client.metrics_core import Metric

from node.context import NodeContext
from node.drain import Drainable
from node.leasing.leases import LeaseState
from node.leasing.prefill_service import PrefillService
from node.leasing.prompts import LeasedPrompts, StartPrefill
from pdserve.flags.declaration import Flag
from pdserve.flags.shared import DAY
from pdserve.metrics import MetricSet
from pdserve.pb import pdserve_pb2_grpc as pb_grpc

LEASING_SERVICE = "pdserve.v1.PrefillNode"


class LeaseSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of leases, with their flags."""

    lease_seconds: Annotated[
        float,
        Flag(
            "length of a lease: how long blocks are kept for a peer that does not extend it",
            metavar="S",
            above=0,
            at_most=DAY,
            group="handoff",
        ),
    ] = 3.0
    lease_guard: Annotated[
        float,
        Flag(
            "how much longer blocks are kept after a lease, against clock drift",
            metavar="S",
            at_least=0,
            at_most=DAY,
            group="handoff",
        ),
    ] = 1.0


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
        """Serve peers. Without ``start_prefill``, only what is cached is leased."""
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
