"""The prefill role: leases and the PrefillNode service."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated

import grpc
import msgspec
from prometheus_client.metrics_core import Metric

from node.context import NodeContext
from node.drain import Drainable
from node.leasing.leases import LeaseState
from node.leasing.prefill_service import PrefillService
from node.leasing.prefills import Prefills
from pdserve.flags import declaration
from pdserve.flags.declaration import Flag
from pdserve.flags.shared import DAY
from pdserve.metrics import MetricSet
from pdserve.pb import pdserve_pb2_grpc as pb_grpc


class PrefillSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that only prefill nodes have, with their flags."""

    lease_seconds: Annotated[
        float,
        Flag(
            "length of a lease: how long blocks are kept for a decode node that does not extend it",
            metavar="S",
            above=0,
            at_most=DAY,
            group="handoffs",
        ),
    ] = 3.0
    lease_guard: Annotated[
        float,
        Flag(
            "how much longer blocks are kept after a lease, against clock drift",
            metavar="S",
            at_least=0,
            at_most=DAY,
            group="handoffs",
        ),
    ] = 1.0
    decode_ahead: Annotated[
        int,
        Flag(
            "most tokens to decode after a prompt's first one while the decode node reads the KV and no other prompt "
            "waits",
            metavar="N",
            at_least=0,
            group="handoffs",
        ),
    ] = 3


class PrefillRole:
    name = "prefill"
    handoff_service = "pdserve.v1.PrefillNode"
    services: tuple[str, ...] = (handoff_service, "pdserve.v1.PoolingNode")
    uses_connector = True
    hands_off_all = False

    def __init__(self, settings: PrefillSettings) -> None:
        self._settings = settings
        self._prefills: Prefills | None = None
        self._metrics = MetricSet()
        for state in LeaseState:
            read = partial(self._count_of, state)
            self._metrics.read_counter(f"pdserve_leases_{state}", f"Leases {state}.", read)

    def attach(self, node: NodeContext, server: grpc.aio.Server) -> Drainable:
        if node.config.pooling is not None:
            from prefill_node.pooling_service import PoolingService  # imports numpy, which takes 0.2 s

            pooling = PoolingService(node, node.config.pooling)
            pb_grpc.add_PoolingNodeServicer_to_server(pooling, server)
            return pooling
        self._prefills = Prefills(node.engine, self._settings.lease_seconds, self._settings.lease_guard)
        service = PrefillService(node, self._prefills, self._settings.decode_ahead)
        pb_grpc.add_PrefillNodeServicer_to_server(service, server)
        return service

    async def connect(self) -> None:
        """Do nothing: decode nodes connect to this node."""

    def drop_peers(self, reason: str) -> None:
        """End all leases; decode nodes connect again by themselves."""
        if self._prefills is not None:
            self._prefills.end_all()

    def connected_peers(self) -> Sequence[str]:
        return ()

    def _count_of(self, state: LeaseState) -> int:
        return 0 if self._prefills is None else self._prefills.table.counts[state]

    def metrics(self) -> Iterable[Metric]:
        return self._metrics.collect()

    async def close(self) -> None:
        if self._prefills is not None:
            self._prefills.close()


def add_flags(parser: argparse.ArgumentParser) -> None:
    declaration.add_flags(parser, PrefillSettings)


def make_role(args: argparse.Namespace) -> PrefillRole:
    return PrefillRole(declaration.options_from(PrefillSettings, args))
