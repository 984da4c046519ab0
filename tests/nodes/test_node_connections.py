"""Connections and streams beyond a node's limits, at its gRPC port and its metrics port."""

from __future__ import annotations

import re
import resource
import socket
import struct
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import grpc
import psutil
import pytest
from fleet import Fleet, NodeCalls, NodeProcess
from machine import patience

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc

FILES = 256  # open files of a node
MOST = FILES // 4 * 3  # connections of a node
STREAMS = 128  # calls at once on a connection
SIMULATED = (
    "--engine",
    "simulated",
    "--sim-speed",
    "1000",
    "--metrics-port",
    "0",
    "--peer-timeout",
    f"{patience(1.0):g}",
)

# HTTP/2 (RFC 9113)
DATA = 0
HEADERS = 1
RST_STREAM = 3
SETTINGS = 4
REFUSED_STREAM = 7
ENHANCE_YOUR_CALM = 11


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0)
#: Literal fields, not indexed (RFC 7541, 6.2.2)
CALL = b"".join(
    b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
    for name, value in {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/pdserve.v1.Node/Watch",
        b":authority": b"x",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }.items()
)


@contextmanager
def open_files(soft: int) -> Iterator[None]:
    """Let processes that start within the block open at most ``soft`` files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        with open_files(FILES):
            fleet.start_prefill(EMBEDDED_MODEL, SIMULATED)
            fleet.start_decode(EMBEDDED_MODEL, SIMULATED)
        fleet.start_router(EMBEDDED_MODEL)
        fleet.wait_ready()
        fleet.wait_until(fleet.serves, 20.0)
        yield fleet


def node_of(fleet: Fleet, role: str) -> NodeProcess:
    return (fleet.decode if role == "decode" else fleet.prefill)[0]


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=patience(20))


def describe(channel: grpc.Channel, seconds: float = 5.0) -> pb.NodeDescription:
    return pb_grpc.NodeStub(channel).Describe(pb.DescribeRequest(), timeout=patience(seconds))


def new_connection(node: NodeCalls) -> grpc.Channel:
    """Channels share a connection otherwise."""
    return grpc.insecure_channel(node.address, (("grpc.use_local_subchannel_pool", 1),))


def accepts(node: NodeCalls) -> bool:
    """Return whether the node serves a call over a new connection."""
    with new_connection(node) as channel:
        try:
            return describe(channel, 2.0).state == "ready"
        except grpc.RpcError:
            return False


@pytest.mark.parametrize("sent", [b"", PREFACE], ids=["bare", "HTTP/2"])
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_connections_beyond_the_limit_are_closed_and_peers_keep_theirs(fleet: Fleet, role: str, sent: bytes) -> None:
    """Connections that answer no ping make room for others within --peer-timeout."""
    node = node_of(fleet, role)
    files = psutil.Process(node.pid).num_fds()
    with ExitStack() as stack, node.channel() as channel:
        assert describe(channel).state == "ready"
        for _ in range(2 * MOST):
            with suppress(ConnectionError):
                stack.enter_context(connect(node.address)).sendall(sent)
        assert psutil.Process(node.pid).num_fds() <= files + MOST
        assert len(fleet.complete(range(3, 80), 20)) == 20, "the router's streams go on"
        assert describe(channel).state == "ready"
        fleet.wait_until(lambda: accepts(node), 20.0)


@pytest.mark.slow
def test_connection_without_a_call_is_closed_within_two_minutes(fleet: Fleet) -> None:
    node = node_of(fleet, "decode")
    states: list[grpc.ChannelConnectivity] = []
    with new_connection(node) as channel, new_connection(node) as used:
        channel.subscribe(states.append)
        assert describe(channel).state == "ready"
        watched: Any = pb_grpc.NodeStub(used).Watch(pb.WatchRequest(pause_ms=1000))
        time.sleep(50.0)
        assert states[-1] is grpc.ChannelConnectivity.READY
        fleet.wait_until(lambda: states[-1] is grpc.ChannelConnectivity.IDLE, 100.0)
        assert next(watched).load.total_blocks
        watched.cancel()


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_calls_beyond_the_streams_of_a_connection_wait_at_the_sender(fleet: Fleet, role: str) -> None:
    node = node_of(fleet, role)
    with node.channel() as channel, ExitStack() as stack:
        watches: list[Any] = []
        for _ in range(STREAMS):
            watches.append(pb_grpc.NodeStub(channel).Watch(pb.WatchRequest(pause_ms=1000)))
            stack.callback(watches[-1].cancel)
            next(watches[-1])
        with pytest.raises(grpc.RpcError) as raised:
            describe(channel, 1.0)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert accepts(node), "other connections have their own limit"
        watches.pop().cancel()
        assert describe(channel).state == "ready"


# ------------------------------------------------------------ a client that breaks the rules of HTTP/2


def frames(sock: socket.socket) -> Iterator[tuple[int, int, bytes]]:
    """Yield kind, stream and payload of frames until the node closes the connection, whose pings get no answer."""
    received = sock.makefile("rb")
    with suppress(ConnectionError):
        while head := received.read(9):
            yield head[3], int.from_bytes(head[5:], "big"), received.read(int.from_bytes(head[:3], "big"))


def test_streams_opened_in_spite_of_the_limit_are_refused(fleet: Fleet) -> None:
    node = node_of(fleet, "decode")
    number = 4 * STREAMS
    with connect(node.address) as sock:
        streams = range(1, 2 * number, 2)
        calls = (frame(HEADERS, 4, stream, CALL) + frame(DATA, 1, stream, bytes(5)) for stream in streams)
        sock.sendall(PREFACE + b"".join(calls))
        refused = set()
        opened = set()
        for kind, stream, payload in frames(sock):
            if kind == RST_STREAM:
                assert int.from_bytes(payload, "big") in (REFUSED_STREAM, ENHANCE_YOUR_CALM)
                refused.add(stream)
            elif kind == HEADERS:
                opened.add(stream)
            if len(refused) + len(opened) >= number:
                break
        assert refused
        assert len(opened) <= STREAMS
        assert accepts(node)
    assert len(fleet.complete(range(3, 40), 20)) == 20


# ------------------------------------------------------------ the metrics port


def test_scraper_is_served_beside_idle_connections_at_the_metrics_port(fleet: Fleet) -> None:
    for node in (*fleet.prefill, *fleet.decode):
        match = re.search(r"metrics at http://(\S+)/metrics", node.output)
        assert match is not None
        with ExitStack() as stack:
            for number in range(2 * FILES):
                stack.enter_context(connect(match[1])).sendall(b"GET /met"[: number % 9])
            for _ in range(5):
                with urllib.request.urlopen(f"http://{match[1]}/metrics", timeout=patience(20)) as response:
                    assert b"pdserve_kv_blocks" in response.read()
            assert accepts(node)
