"""A channel waits for a peer that accepts a connection late, and not for one that never does."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from fleet import Fleet, NodeProcess
from machine import patience

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.channel import channel_options
from pdserve.rpc.timeouts import PeerTiming


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with Fleet() as fleet:
        node = fleet.start_prefill(EMBEDDED_MODEL, ["--engine", "simulated"])
        fleet.wait_ready()
        yield node


@contextmanager
def stopped(node: NodeProcess) -> Iterator[None]:
    """The kernel accepts connections to a stopped process, which sends nothing on them."""
    node.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        node.signal(signal.SIGCONT)


def open_channel(node: NodeProcess, timing: PeerTiming) -> grpc.Channel:
    return grpc.insecure_channel(node.address, options=channel_options(timing))


def call(channel: grpc.Channel, *, wait_for_ready: bool = False) -> grpc.CallFuture[pb.NodeStatus]:
    """``wait_for_ready``: failed attempts to connect are repeated until the timeout."""
    stub = pb_grpc.NodeStub(channel)
    return stub.Status.future(pb.StatusRequest(), timeout=patience(60.0), wait_for_ready=wait_for_ready)


@pytest.mark.parametrize("seconds", [0.05, 0.3, 1.5])
def test_a_late_peer_is_connected(node: NodeProcess, seconds: float) -> None:
    with open_channel(node, PeerTiming(40.0)) as channel:
        with stopped(node):
            answer = call(channel)
            time.sleep(seconds)
        assert answer.result().total_blocks > 0


def test_a_peer_that_never_answers_is_unavailable(node: NodeProcess) -> None:
    with open_channel(node, PeerTiming(1.0)) as channel:
        with stopped(node), pytest.raises(grpc.RpcError) as raised:
            call(channel).result()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert call(channel, wait_for_ready=True).result().total_blocks > 0
