"""Options of a node's frontend process with their flags, in addition to those of pdserve/config/node_options.py."""

from __future__ import annotations

import socket
from typing import Annotated

from node.kv_events.flags import KVEventFlags as ListenerOptions  # listens to the prefix cache
from pdserve.errors import ConfigError
from pdserve.flags.declaration import Flag
from pdserve.flags.shared import DRAIN_SECONDS, LIFELINE_FD, STATUS_FD, drain_flag
from pdserve.flags.value_types import parse_size, port_number
from pdserve.logs import LOG_FORMAT, LOG_LEVEL
from pdserve.rpc.address import join_address
from pdserve.tracing.trace_flags import TRACES

_WILDCARDS = ("0.0.0.0", "::", "[::]", "")


class FrontendOptions(ListenerOptions, frozen=True, kw_only=True):
    """Network, identity, logs and parent process of a node."""

    host: Annotated[str, Flag("address to listen on", group="network")] = "127.0.0.1"
    port: Annotated[
        int, Flag("port to listen on; 0 takes a free one (default)", parse=port_number, group="network")
    ] = 0
    node_id: Annotated[
        str | None, Flag("unique name of this node", metavar="NAME", unset="its address", group="network")
    ] = None
    advertise: Annotated[
        str | None,
        Flag("address for others to connect to", metavar="HOST[:PORT]", unset="the bound one", group="network"),
    ] = None
    metrics_port: Annotated[
        int | None,
        Flag(
            "serve /metrics for Prometheus over HTTP on this port; 0 takes a free one",
            metavar="PORT",
            parse=port_number,
            unset="none",
            group="network",
        ),
    ] = None
    drain_timeout: Annotated[float, drain_flag("it is handed over to other nodes").within("network")] = DRAIN_SECONDS
    allow_weight_changes: Annotated[
        str,
        Flag(
            "let callers of gRPC load other checkpoints of the same model from below DIR while the node runs, "
            "and send patches (`pdserve weights`); use --grpc-tls with it",
            metavar="DIR",
            unset="no changes",
            group="network",
        ),
    ] = ""
    image_memory: Annotated[
        int,
        Flag(
            "most memory of images that routers send, while prompts wait for them or are computed",
            metavar="SIZE",
            parse=parse_size,
            at_least=1,
            group="images",
        ),
    ] = 1 << 30
    log_format: Annotated[str, LOG_FORMAT.within("logs and traces")] = "text"
    log_level: Annotated[str, LOG_LEVEL.within("logs and traces")] = ""
    log_requests: Annotated[bool, Flag("log a line per request", group="logs and traces")] = False
    traces: Annotated[str, TRACES.within("logs and traces")] = ""
    status_fd: Annotated[int | None, STATUS_FD.within("for the parent process")] = None
    lifeline_fd: Annotated[int | None, LIFELINE_FD.within("for the parent process")] = None

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
