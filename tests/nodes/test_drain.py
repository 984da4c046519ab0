"""Draining nodes: which requests they accept, and when they exit. The nodes are simulated."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from fleet import Fleet, NodeProcess, add_tokenizer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from machine import patience
from node_client import Prefill, PrefillClient, PrefillFailed, RouterClient, greedy

from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import pack_tokens, sampling_to_pb

SLOW_STEPS = ("--engine", "simulated", "--sim-costs", "step=0.02")
SLOW_PROMPTS = ("--max-batch-tokens", "64", "--max-num-seqs", "64")  # a step each
SHORT_LEASES = ("--lease-seconds", "0.6", "--lease-guard", "0.2")
END_SECONDS = 10.0
PROMPT = list(range(3, 43))
SERVING = health_pb2.HealthCheckResponse.SERVING

Start = Callable[..., NodeProcess]


@pytest.fixture
def fleet(checkpoint: Path) -> Iterator[Fleet]:
    with closing(Fleet()) as fleet:
        yield fleet


@pytest.fixture
def start(fleet: Fleet, checkpoint: Path) -> Start:
    """Return a function that starts a node of a role and waits until it is ready."""

    def start(role: str, *flags: str) -> NodeProcess:
        start_node = fleet.start_prefill if role == "prefill" else fleet.start_decode
        node = start_node(add_tokenizer(checkpoint), [*SLOW_STEPS, *flags])
        fleet.wait_ready()
        return node

    return start


def serves(node: NodeProcess) -> tuple[bool, bool, bool]:
    """Return the health services that serve: live, loaded, ready."""
    with grpc.insecure_channel(node.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        live, loaded, ready = (
            health.Check(health_pb2.HealthCheckRequest(service=service), timeout=patience(5.0)).status == SERVING
            for service in ("live", "loaded", "")
        )
    return live, loaded, ready


def drain(fleet: Fleet, node: NodeProcess) -> None:
    node.signal(signal.SIGTERM)
    fleet.wait_until(lambda: node.describe().state == "draining", END_SECONDS)


def assert_ended(node: NodeProcess) -> None:
    node.wait_ended(END_SECONDS)
    assert node.child.process.returncode == 0, node.output
    assert not any(word in node.output for word in ("Traceback", "ERROR")), node.output


def prefill_request(node: NodeProcess, prompt: list[int] = PROMPT) -> pb.PrefillRequest:
    return pb.PrefillRequest(
        epoch=node.describe().epoch, token_ids=pack_tokens(prompt), sampling=sampling_to_pb(greedy(4))
    )


def ready_of(prefill: Prefill) -> pb.KVReady:
    """Return the last announcement of a prompt."""
    return prefill.all()[-1].kv_ready


# ---------------------------------------------------------------- decode nodes


def test_a_draining_decode_node_finishes_open_requests_and_refuses_new_ones(fleet: Fleet, start: Start) -> None:
    node = start("decode")
    with RouterClient(node.address) as client, RouterClient(node.address) as idle:
        running = client.send(PROMPT, greedy(100, n=2))
        assert running.started.wait(patience(END_SECONDS))
        drain(fleet, node)
        assert serves(node) == (True, True, False)
        late = idle.generate(PROMPT, greedy(4)).failure
        assert late is not None
        assert late.code == pb.Failure.DRAINING
        assert {choice: len(tokens) for choice, tokens in running.wait().choices.items()} == {0: 100, 1: 100}
        assert not idle.error, "its stream was open until the node ended"
        client.half_close()
        idle.half_close()
        assert_ended(node)
        assert client.draining
        assert idle.draining


def test_requests_open_after_the_drain_timeout_of_a_decode_node_are_handed_over(start: Start) -> None:
    node = start("decode", "--drain-timeout", "0.3")
    with RouterClient(node.address) as client:
        running = client.send(PROMPT, greedy(2000))
        assert running.started.wait(patience(END_SECONDS))
        node.signal(signal.SIGTERM)
        failure = running.wait().failure
        assert failure is not None
        assert failure.code == pb.Failure.DRAINING
        client.half_close()
        assert_ended(node)
        assert not client.error


@pytest.mark.parametrize("signals", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)], ids=["ctrl-c", "twice"])
def test_sigint_or_a_second_signal_hands_requests_over_at_once(
    fleet: Fleet, start: Start, signals: tuple[signal.Signals, ...]
) -> None:
    node = start("decode")
    with RouterClient(node.address) as client:
        running = client.send(PROMPT, greedy(2000))
        assert running.started.wait(patience(END_SECONDS))
        for number in signals[:-1]:
            node.signal(number)
            fleet.wait_until(lambda: node.describe().state == "draining", END_SECONDS)
        node.signal(signals[-1])
        assert_ended(node)
        failure = running.wait().failure
        assert failure is not None
        assert failure.code == pb.Failure.DRAINING


# ---------------------------------------------------------------- prefill nodes


@pytest.mark.parametrize("order", ["starts later", "restarts"])
def test_peers_do_not_warn_of_a_node_that_starts_or_drains(
    fleet: Fleet, start: Start, checkpoint: Path, order: str
) -> None:
    node = start("prefill")
    if order == "starts later":
        node.kill()
    peer = fleet.start_decode(add_tokenizer(checkpoint), ["--engine", "simulated"])
    if order == "restarts":
        fleet.wait_ready()
        fleet.wait_until(lambda: list(peer.describe().connected_peers) != [], END_SECONDS)
        node.status()  # it answers behind the stream that the peer has opened, and says on it that it drains
        node.signal(signal.SIGTERM)
        node.wait_ended(END_SECONDS)
    fleet.wait_until(lambda: "failed to connect" in peer.output, END_SECONDS)
    node.restart()
    fleet.wait_until(lambda: f"connected to prefill node {node.address}" in peer.output, END_SECONDS)
    assert "WARNING" not in peer.output


def test_a_draining_prefill_node_keeps_its_leases(fleet: Fleet, start: Start) -> None:
    """SIGTERM comes between an announcement and the read."""
    node = start("prefill")
    with PrefillClient(node.address) as client:
        prefill = client.send(prefill_request(node))
        ready = ready_of(prefill)
        drain(fleet, node)
        assert serves(node) == (True, True, False)
        with pytest.raises(PrefillFailed) as refused:
            client.send(prefill_request(node)).all()
        assert refused.value.code == pb.Failure.DRAINING
        assert client.extend(prefill) > 0
        assert node.status().leased_blocks == len(ready.block_ids)
        assert client.release(prefill), "it stood"
        client.half_close()
        assert client.draining
        assert_ended(node)


def test_a_draining_prefill_node_computes_accepted_prompts(fleet: Fleet, start: Start) -> None:
    node = start("prefill", *SLOW_PROMPTS)
    prompt = [3 + i % 100 for i in range(1000)]
    with PrefillClient(node.address) as client:
        prefills = [client.send(prefill_request(node, [i, *prompt])) for i in range(3, 6)]
        assert prefills[-1].next().WhichOneof("kind") == "accepted"
        drain(fleet, node)
        for prefill in prefills:
            ready_of(prefill)
            assert client.release(prefill)
        client.half_close()
        assert_ended(node)


def test_a_draining_prefill_node_exits_when_the_lease_of_a_vanished_decode_node_expires(start: Start) -> None:
    """The stream ends without a release."""
    node = start("prefill", *SHORT_LEASES)
    with PrefillClient(node.address) as client:
        ready_of(client.send(prefill_request(node)))
    node.signal(signal.SIGTERM)
    assert_ended(node)
    assert "expired" in node.output


def test_prompts_not_computed_within_the_drain_timeout_fail_as_draining(start: Start) -> None:
    node = start("prefill", *SLOW_PROMPTS, *SHORT_LEASES, "--drain-timeout", "0.2")
    prompt = [3 + i % 100 for i in range(4000)]
    with PrefillClient(node.address) as client:
        prefills = [client.send(prefill_request(node, [i, *prompt])) for i in range(3, 5)]
        assert prefills[-1].next().WhichOneof("kind") == "accepted"
        node.signal(signal.SIGTERM)
        for prefill in prefills:
            with pytest.raises(PrefillFailed) as failed:
                prefill.all()
            assert failed.value.code == pb.Failure.DRAINING
        assert_ended(node)
