"""The prefill role: leases and the PrefillNode service."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

import grpc
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from node.context import NodeContext
from node.drain import Drainable
from pdserve.errors import ConfigError
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from prefill_node.pooling_service import PoolingService
from prefill_node.prefill_service import PrefillService
from prefill_node.prefills import Prefills


class PrefillRole:
    name = "prefill"
    handoff_service = "pdserve.v1.PrefillNode"
    services: tuple[str, ...] = (handoff_service, "pdserve.v1.PoolingNode")
    uses_connector = True
    hands_off_all = False

    def __init__(self, *, lease_seconds: float, lease_guard: float, decode_ahead: int) -> None:
        if not 0 < lease_seconds < float("inf") or not 0 <= lease_guard < float("inf"):
            raise ConfigError(
                f"--lease-seconds {lease_seconds} must be above 0 and --lease-guard {lease_guard} at least 0"
            )
        if decode_ahead < 0:
            raise ConfigError(f"--decode-ahead {decode_ahead} must be at least 0")
        self._decode_ahead = decode_ahead
        self._lease_seconds = lease_seconds
        self._lease_guard = lease_guard
        self._prefills: Prefills | None = None

    def attach(self, node: NodeContext, server: grpc.aio.Server) -> Drainable:
        if node.config.pooling is not None:
            pooling = PoolingService(node, node.config.pooling)
            pb_grpc.add_PoolingNodeServicer_to_server(pooling, server)
            return pooling
        self._prefills = Prefills(node.engine, self._lease_seconds, self._lease_guard)
        service = PrefillService(node, self._prefills, self._decode_ahead)
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

    def metrics(self) -> Iterable[Metric]:
        counts = {} if self._prefills is None else self._prefills.table.counts
        for state, count in counts.items():
            yield CounterMetricFamily(f"pdserve_leases_{state}", f"Leases {state}.", count)

    async def close(self) -> None:
        if self._prefills is not None:
            self._prefills.close()


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("handoffs")
    group.add_argument(
        "--lease-seconds",
        type=float,
        default=3.0,
        metavar="S",
        help="length of a lease: how long blocks are kept for a decode node that does not extend it "
        "(default %(default)s)",
    )
    group.add_argument(
        "--lease-guard",
        type=float,
        default=1.0,
        metavar="S",
        help="how much longer blocks are kept after a lease, against clock drift (default %(default)s)",
    )
    group.add_argument(
        "--decode-ahead",
        type=int,
        default=3,
        metavar="N",
        help="most tokens to decode after a prompt's first one while the decode node reads the KV and no other prompt "
        "waits (default %(default)s)",
    )


def make_role(args: argparse.Namespace) -> PrefillRole:
    return PrefillRole(
        lease_seconds=args.lease_seconds,
        lease_guard=args.lease_guard,
        decode_ahead=args.decode_ahead,
    )
