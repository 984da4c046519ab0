"""``pdserve probe``: health of a node or router as an exit status. Kubernetes' own gRPC probes do not support TLS.

Services (node/health.py): live, loaded, and the empty name for readiness. Routers, which speak HTTP, have no
service ``loaded``.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import ssl
from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.errors import ConfigError, NodeError
from pdserve.flags.declaration import add_flag
from pdserve.flags.parser import CommandParser, command_parser
from pdserve.flags.shared import GRPC_TLS
from pdserve.host.process import run_command
from pdserve.rpc import channel as rpc
from pdserve.rpc.address import split_address
from pdserve.rpc.errors import rpc_reason
from pdserve.rpc.tls import PeerTls

_ROUTER_PATHS = {"": "/health", "live": "/health/live"}


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: probe(make_parser().parse_args(argv)))


def make_parser() -> CommandParser:
    parser = command_parser("pdserve probe", "Check the health of a node or router: exit status 0 if healthy.")
    parser.add_argument("address", metavar="HOST:PORT", help="address of the node, or http://HOST:PORT of a router")
    parser.add_argument(
        "service",
        metavar="SERVICE",
        nargs="?",
        default="",
        help="live: the engine responds; loaded: the model is loaded; without: the node accepts requests",
    )
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="seconds (default %(default)s)")
    add_flag(parser, "grpc_tls", GRPC_TLS)
    return parser


def probe(args: argparse.Namespace) -> int:
    """Return 0 if the service serves, 1 if it does not. Raises NodeError without an answer in time."""
    if (url := urlsplit(args.address)).scheme in ("http", "https"):
        serves = _router_serves(url, args.service, args.timeout)
        print(f"{args.service or 'service'} at {args.address}: {'serving' if serves else 'not serving'}")
        return 0 if serves else 1
    split_address(args.address)
    tls = None if args.grpc_tls is None else PeerTls(args.grpc_tls)
    serves = asyncio.run(_serves(args.address, args.service, tls, args.timeout))
    print(f"{args.service or 'service'} at {args.address}: {'serving' if serves else 'not serving'}")
    return 0 if serves else 1


def _router_serves(url: SplitResult, service: str, timeout: float) -> bool:
    """Return the health of the router at a URL. Raises ConfigError or NodeError."""
    if service not in _ROUTER_PATHS:
        raise ConfigError(f"{url.geturl()} is a router's URL, and routers have no service {service!r}; give host:port")
    tls = url.scheme == "https"
    address = url.netloc if url.port else f"{url.netloc}:{443 if tls else 80}"
    healthy = _router_health(address, service, timeout, tls)
    if healthy is None:
        raise NodeError(f"no answer from {url.geturl()}; check the address, and that the router runs")
    return healthy


def _router_health(address: str, service: str, timeout: float, tls: bool = False) -> bool | None:
    """Return the health of a router over HTTP; None if no HTTP server answers. Certificates are not checked."""
    host, port = split_address(address)
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
    try:
        connection.request("GET", _ROUTER_PATHS[service])
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


async def _serves(address: str, service: str, tls: PeerTls | None, timeout: float) -> bool:
    async with rpc.open_channel(address, tls=tls) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        except grpc.aio.AioRpcError as exc:
            if service in _ROUTER_PATHS and (healthy := _router_health(address, service, timeout)) is not None:
                return healthy
            raise NodeError(f"no answer on {service or 'the node'!r} from {address}: {rpc_reason(exc)}") from exc
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
