"""The decode role: connections to prefill nodes, handoffs, and the DecodeNode service."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

import grpc
from prometheus_client.metrics_core import Metric

from decode_node.decode_metrics import DecodeMetrics
from decode_node.decode_service import DecodeService
from decode_node.handoff_driver import FailurePolicy, Handoffs
from decode_node.prefill_peers import PrefillPeers
from node.context import NodeContext
from node.drain import Drainable
from pdserve.discovery.sources import check_source
from pdserve.errors import ConfigError
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.transports import REQUIRABLE


class DecodeRole:
    name = "decode"
    services: tuple[str, ...] = ("pdserve.v1.DecodeNode",)

    def __init__(
        self,
        *,
        prefill: Sequence[str],
        failure_policy: FailurePolicy,
        handoff_min_tokens: int,
        peer_wait: float,
        require_transport: str,
    ) -> None:
        """The arguments are those of the flags. Raises ConfigError."""
        if handoff_min_tokens < 0 or not 0 <= peer_wait < float("inf"):
            raise ConfigError(
                f"--handoff-min-tokens {handoff_min_tokens} and --peer-wait {peer_wait} must be at least 0"
            )
        for source in prefill:
            check_source(source)
        self.uses_connector = bool(prefill)
        self.hands_off_all = handoff_min_tokens == 0
        self._sources = prefill
        self._failure_policy = failure_policy
        self._min_tokens = handoff_min_tokens
        self._peer_wait = peer_wait
        self._require_transport = require_transport
        self._metrics = DecodeMetrics()
        self._peers: PrefillPeers | None = None

    def attach(self, node: NodeContext, server: grpc.aio.Server) -> Drainable:
        self._peers = PrefillPeers(
            node,
            self._metrics,
            sources=self._sources,
            required_transport=self._require_transport,
        )
        handoffs = Handoffs(
            node,
            self._peers,
            self._metrics,
            min_tokens=self._min_tokens,
            failure_policy=self._failure_policy,
        )
        service = DecodeService(node, handoffs)
        pb_grpc.add_DecodeNodeServicer_to_server(service, server)
        return service

    async def connect(self) -> None:
        if self._peers is not None:
            await self._peers.start(self._peer_wait)

    def drop_peers(self, reason: str) -> None:
        if self._peers is not None:
            self._peers.drop(reason)

    def connected_peers(self) -> Sequence[str]:
        return self._peers.connected_ids() if self._peers is not None else ()

    def metrics(self) -> Iterable[Metric]:
        return self._metrics.collect()

    async def close(self) -> None:
        if self._peers is not None:
            await self._peers.close()


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("handoff")
    group.add_argument(
        "--prefill",
        action="append",
        default=[],
        metavar="SOURCE",
        help="prefill nodes: host:port, dns://name:port, k8s://namespace/service:port or file:///path; repeatable",
    )
    group.add_argument(
        "--kv-failure-policy",
        choices=[policy.value for policy in FailurePolicy],
        default=FailurePolicy.RECOMPUTE.value,
        help="when a handoff fails: prefill on this node, or fail the request (default %(default)s)",
    )
    group.add_argument(
        "--handoff-min-tokens",
        type=int,
        default=32,
        metavar="N",
        help="prefill prompts on this node that lack KV of fewer tokens; 0 hands all off (default %(default)s)",
    )
    group.add_argument(
        "--require-transport",
        choices=REQUIRABLE,
        default="",
        metavar="KIND",
        help="refuse connections to prefill nodes that are slower than KIND: shm (memory shared by processes of a "
        "host: UCX's cma, sysv, posix, xpmem, knem; not for KV on GPUs), rdma (network cards with remote DMA: rc, dc, "
        "ud, srd, gga) or nvlink (between GPUs of a host: cuda_ipc). Each accepts the kinds after it; plain TCP "
        "satisfies none. Judged by the lanes that UCX chose, not by their speed (default: any, with a warning for TCP)",
    )
    group.add_argument(
        "--peer-wait",
        type=float,
        default=60.0,
        metavar="S",
        help="longest wait for a first prefill node before the node is ready without one (default %(default)s)",
    )


def make_role(args: argparse.Namespace) -> DecodeRole:
    return DecodeRole(
        prefill=args.prefill,
        failure_policy=FailurePolicy(args.kv_failure_policy),
        handoff_min_tokens=args.handoff_min_tokens,
        peer_wait=args.peer_wait,
        require_transport=args.require_transport,
    )
