"""gRPC settings of all processes.

Keepalive closes the connection to a dead or hung peer within the timeouts of pdserve/rpc/timeouts.py, with or without
calls in flight. The calls fail with UNAVAILABLE.
"""

from __future__ import annotations

import resource

import grpc

from pdserve.errors import CapacityError
from pdserve.rpc.address import join_address, probe_port
from pdserve.rpc.message_limits import ANSWER_LIMIT
from pdserve.rpc.timeouts import DEFAULT_TIMING, PeerTiming
from pdserve.rpc.tls import SERVER_NAME, PeerTls

_IDLE = 60.0  # seconds without a call after which a server closes a connection; gRPC takes up to twice as long
_FEWEST = 64  # connections of a server
_MOST = 65_536  # connections of a server

Options = tuple[tuple[str, int | str], ...]

_COMMON: Options = (
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # 0: no limit
)
_CHANNEL: Options = (
    ("grpc.max_receive_message_length", ANSWER_LIMIT),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),  # a restarted pod has a new address; gRPC's default is 30 s
    ("grpc.client_idle_timeout_ms", 2**31 - 1),  # keep idle channels connected: a closed one means that the peer ended
    ("grpc.enable_http_proxy", 0),  # cluster traffic never uses $http_proxy
    ("grpc.use_local_subchannel_pool", 1),  # channels to one address share neither connections nor back-off
)
_SERVER: Options = (
    ("grpc.max_concurrent_streams", 128),  # per connection; a router has about ten
    ("grpc.so_reuseport", 0),  # a second node on the same port is an error
    ("grpc.http2.min_ping_interval_without_data_ms", 200),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 200),
    ("grpc.http2.max_ping_strikes", 0),  # 0: never close a connection for its keepalive pings
)


def channel_options(timing: PeerTiming = DEFAULT_TIMING) -> Options:
    # Despite its name this is the time of an attempt to connect, TLS and the server's first frame included
    # (MIN_CONNECT_TIMEOUT in gRPC's doc/connection-backoff.md). A refused attempt is repeated after the back-off.
    attempt = ("grpc.min_reconnect_backoff_ms", int(timing.answer_timeout * 1000))
    return (*_COMMON, *_keepalive(timing), *_CHANNEL, attempt)


def server_options(timing: PeerTiming = DEFAULT_TIMING, max_request: int = ANSWER_LIMIT) -> Options:
    """``max_request`` is in bytes. A quarter of the open files that the process may have is kept from connections."""
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    idle = max(_IDLE, 2 * timing.connect_timeout)  # a decode node sends nothing while its connector connects
    return (
        *_COMMON,
        ("grpc.max_receive_message_length", max_request),
        ("grpc.max_allowed_incoming_connections", max(_FEWEST, min(_MOST, open_files // 4 * 3))),
        ("grpc.max_connection_idle_ms", int(idle * 1000)),
        *_keepalive(timing),
        *_SERVER,
    )


def open_channel(address: str, timing: PeerTiming = DEFAULT_TIMING, tls: PeerTls | None = None) -> grpc.aio.Channel:
    """Return a channel to ``host:port`` that connects and reconnects on use."""
    options = channel_options(timing)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    named = (*options, ("grpc.ssl_target_name_override", SERVER_NAME))
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=named)


class Dialer:
    """A lasting channel to one address. Call ``renew`` between calls to present a renewed certificate."""

    def __init__(self, address: str, timing: PeerTiming = DEFAULT_TIMING, tls: PeerTls | None = None) -> None:
        self._address = address
        self._timing = timing
        self._tls = tls
        self._version = None if tls is None else tls.version
        self.channel = open_channel(address, timing, tls)

    async def renew(self) -> grpc.aio.Channel:
        """Return the channel; reopen it if the certificate has changed, which ends calls on the old one."""
        if self._tls is not None and self._tls.version != self._version:
            self._version = self._tls.version
            old = self.channel
            self.channel = open_channel(self._address, self._timing, self._tls)
            await old.close(None)
        return self.channel

    async def close(self) -> None:
        await self.channel.close(None)


def _keepalive(timing: PeerTiming) -> Options:
    timeout = int(timing.answer_timeout * 1000)
    return (
        ("grpc.keepalive_time_ms", int(timing.probe_after * 1000)),
        ("grpc.keepalive_timeout_ms", timeout),
        ("grpc.http2.ping_timeout_ms", timeout),  # closes the connection; gRPC's default is 60 s
    )


def check_port(host: str, port: int) -> None:
    """Raise CapacityError unless a server can bind the port; gRPC would log an error without the reason."""
    try:
        probe_port(host, port)
    except OSError as exc:
        raise _port_taken(host, port, (exc.strerror or str(exc)).lower()) from exc


def bind(server: grpc.aio.Server, host: str, port: int, tls: PeerTls | None = None) -> int:
    """Bind a server's port (0: any free port) and return it. Raises CapacityError if it is taken."""
    check_port(host, port)
    address = join_address(host, port)
    try:
        if tls is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, tls.server_credentials()))
    except RuntimeError as exc:
        raise _port_taken(host, port, "address already in use") from exc


def _port_taken(host: str, port: int, reason: str) -> CapacityError:
    address = join_address(host, port)
    return CapacityError(f"cannot listen on {address}: {reason}; choose another --port (0 takes a free one) or --host")
