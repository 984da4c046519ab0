"""``pdserve probe``: a node's health as an exit status. Kubernetes' own gRPC probes do not support TLS.

Services (engine/frontend/health.py): live, loaded, and the empty name for readiness.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.errors import NodeError
from pdserve.rpc import channel as rpc
from pdserve.rpc.errors import rpc_reason
from pdserve.rpc.tls import PeerTls


def probe(args: argparse.Namespace) -> int:
    """Return 0 if the service serves, 1 if it does not. Raises NodeError without an answer in time."""
    tls = None if args.grpc_tls is None else PeerTls(args.grpc_tls)
    serves = asyncio.run(_serves(args.address, args.service, tls, args.timeout))
    print(f"{args.service or 'node'} at {args.address}: {'serving' if serves else 'not serving'}")
    return 0 if serves else 1


async def _serves(address: str, service: str, tls: PeerTls | None, timeout: float) -> bool:
    async with rpc.open_channel(address, tls=tls) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        except grpc.aio.AioRpcError as exc:
            raise NodeError(f"no answer on {service or 'the node'!r} from {address}: {rpc_reason(exc)}") from exc
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
