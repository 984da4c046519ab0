"""Flags of a node's frontend process, in addition to those of pdserve/config/flags.py."""

from __future__ import annotations

import argparse
import socket

import msgspec

from pdserve.config.flags import DRAIN_SECONDS, add_drain_flag, port_number
from pdserve.errors import ConfigError
from pdserve.logs import add_log_flag
from pdserve.rpc.address import join_address
from pdserve.tracing.trace_flags import add_trace_flag

_WILDCARDS = ("0.0.0.0", "::", "[::]", "")


class FrontendOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Network, identity, logs and parent process of a node."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    node_id: str | None = None  # None: its address
    advertise: str | None = None  # host or host:port for other processes to connect to
    metrics_port: int | None = None  # 0: any free one; None: no metrics over HTTP
    drain_timeout: float = DRAIN_SECONDS
    status_fd: int | None = None
    lifeline_fd: int | None = None
    log_format: str = "text"
    log_level: str = ""  # PDSERVE_LOG_LEVEL
    log_requests: bool = False
    allow_weight_changes: str = ""  # directory of checkpoints; "": no changes
    traces: str = ""  # URL of a collector; "": no traces

    def address(self, port: int) -> str:
        """Return the ``host:port`` for others to connect to, given the bound ``port``."""
        if self.advertise is None:
            return join_address(socket.gethostname() if self.host in _WILDCARDS else self.host, port)
        host, colon, explicit = self.advertise.rpartition(":")
        if not colon or self.advertise.endswith("]"):
            return join_address(self.advertise, port)
        if not explicit.isdecimal():
            raise ConfigError(f"--advertise {self.advertise!r} is neither a host nor host:port; write one of them")
        return join_address(host, int(explicit))


def add_frontend_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    group.add_argument("--port", type=port_number, default=0, help="port to listen on; 0 takes a free one (default)")
    group.add_argument("--node-id", metavar="NAME", help="unique name of this node (default: its address)")
    group.add_argument(
        "--advertise", metavar="HOST[:PORT]", help="address for others to connect to (default: the bound one)"
    )
    group.add_argument(
        "--metrics-port",
        type=port_number,
        metavar="PORT",
        help="serve /metrics for Prometheus over HTTP on this port; 0 takes a free one (default: none)",
    )
    add_drain_flag(group, "it is handed over to other nodes")
    group.add_argument(
        "--allow-weight-changes",
        default="",
        metavar="DIR",
        help="let callers of gRPC load other checkpoints of the same model from below DIR while the node runs, "
        "and send patches (`pdserve weights`); use --grpc-tls with it (default: no changes)",
    )
    observability = parser.add_argument_group("logs and traces")
    add_log_flag(observability)
    observability.add_argument("--log-requests", action="store_true", help="log a line per request")
    add_trace_flag(observability)
    internal = parser.add_argument_group("for the parent process")
    internal.add_argument("--status-fd", type=int, metavar="FD", help="write JSON status lines to this descriptor")
    internal.add_argument("--lifeline-fd", type=int, metavar="FD", help="exit when its other end is closed")


def frontend_options_from(args: argparse.Namespace) -> FrontendOptions:
    return FrontendOptions(**{name: getattr(args, name) for name in FrontendOptions.__struct_fields__})
