"""Comparison of read KV with P's digests, and refusal of slow transports."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
from fault_proxy import FaultProxy
from fleet import Fleet, NodeProcess
from machine import patience
from node_client import RouterClient, greedy
from node_fleet import FLAGS

from pdserve.pb import pdserve_pb2 as pb

BLOCK = 8  # tokens
STEP = 64  # tokens of a step of the prefill node
LENGTH = 300  # tokens of the prompts here
PREFILL = [*FLAGS, "--max-batch-tokens", str(STEP), "--max-num-seqs", "8"]


def prompt_of(seed: int) -> list[int]:
    rng = random.Random(f"integrity {seed}")
    return [rng.randrange(3, 128) for _ in range(LENGTH)]


class Checked:
    """A prefill node, a proxy, and a decode node for each failure policy, with checksums. Pages differ."""

    def __init__(self, checkpoint: Path, prefills: Fleet, decodes: Fleet, proxy: FaultProxy) -> None:
        self.proxy = proxy
        flags = ("--prefill", proxy.address)
        proxy.target = prefills.start_prefill(checkpoint, PREFILL).address
        decodes.start_decode(checkpoint, [*FLAGS, *flags, "--kernel-block-size", "4"])
        decodes.start_decode(checkpoint, [*FLAGS, *flags, "--kv-failure-policy", "fail"])
        prefills.wait_ready()
        decodes.wait_ready()
        self.prefill = prefills.prefill[0]
        self.decode, self.strict = decodes.decode
        self._decodes = decodes

    def settle(self) -> None:
        """Wait until both are connected and all are idle; reset the proxy."""
        self.proxy.reset()
        for node in (self.prefill, self.decode, self.strict):
            node.wait_idle()
        for node in (self.decode, self.strict):
            self._decodes.wait_until(partial(_is_connected, node), 20.0)


def _is_connected(node: NodeProcess) -> bool:
    return len(node.describe().connected_peers) == 1


@pytest.fixture(scope="module")
def started(checkpoint: Path) -> Iterator[Checked]:
    with Fleet() as prefills, Fleet() as decodes, FaultProxy() as proxy:
        yield Checked(checkpoint, prefills, decodes, proxy)


@pytest.fixture
def checked(started: Checked) -> Iterator[Checked]:
    yield started
    started.settle()


def corrupt(part: int, block: int) -> Callable[[pb.PrefillEvent], Iterable[pb.PrefillEvent]]:
    """Return an ``alter_event`` that flips one bit of one digest in the ``part``-th announcement."""
    seen = 0

    def alter(event: pb.PrefillEvent) -> tuple[pb.PrefillEvent]:
        nonlocal seen
        if event.HasField("kv_ready"):
            seen += 1
            if seen == part:
                event.kv_ready.digests[block] ^= 1 << 40
        return (event,)

    return alter


def test_checksummed_kv_yields_exact_tokens(checked: Checked) -> None:
    """All blocks have a digest, D skips cached prefixes, and choices share the read KV."""
    num_digests = 0

    def look(event: pb.PrefillEvent) -> tuple[pb.PrefillEvent]:
        nonlocal num_digests
        assert len(event.kv_ready.digests) == len(event.kv_ready.block_ids)
        num_digests += len(event.kv_ready.digests)
        return (event,)

    checked.proxy.alter_event = look
    prompt = prompt_of(1)
    with RouterClient(checked.decode.address) as client:
        for sampling in (greedy(10), greedy(10, n=3, temperature=1.0, seed=5)):
            expected = client.generate(prompt, sampling, cache_salt="local").choices
            assert (
                client.generate(prompt, sampling, checked.prefill.address, cache_salt=f"{sampling.n}").choices
                == expected
            )
        client.generate(prompt[: 10 * BLOCK], greedy(2), cache_salt="cached")
        before = num_digests
        assert before == 2 * -(-LENGTH // BLOCK)
        client.generate(prompt, greedy(2), checked.prefill.address, cache_salt="cached")
        assert num_digests == before + -(-LENGTH // BLOCK) - 10
    assert checked.decode.counter("handoff_failures") == 0
    assert checked.decode.counter("kv_checksum_failures") == 0


@pytest.mark.parametrize(("part", "block"), [(1, 0), (3, 7), (5, -1)], ids=["first", "middle", "last, partly filled"])
def test_a_corrupt_block_is_recomputed(part: int, block: int, checked: Checked) -> None:
    node = checked.decode
    prompt = prompt_of(2)
    with RouterClient(node.address) as client:
        expected = client.generate(prompt, greedy(10), cache_salt="local").tokens
        names = ("kv_checksum_failures", "kv_read_failures", "handoff_recomputes", "peer_losses")
        before = [node.counter(name) for name in names]
        tokens = node.counter("handoff_recomputed_tokens")
        checked.proxy.alter_event = corrupt(part, block)
        result = client.generate(prompt, greedy(10), checked.prefill.address, cache_salt=f"{part}")
        assert result.tokens == expected
        assert [node.counter(name) - was for name, was in zip(names, before, strict=True)] == [1, 1, 1, 0]
        assert node.counter("handoff_recomputed_tokens") == tokens + LENGTH
    number = (part - 1) * STEP // BLOCK + block if block >= 0 else (LENGTH - 1) // BLOCK
    assert f"KV from node {checked.proxy.address} is corrupt" in node.output
    assert f"block {number} of the prompt" in node.output


def test_a_corrupt_block_fails_the_request_under_policy_fail(checked: Checked) -> None:
    checked.proxy.alter_event = corrupt(2, 1)
    with RouterClient(checked.strict.address) as client:
        failure = client.generate(prompt_of(3), greedy(10), checked.prefill.address).failure
    assert failure is not None
    assert failure.code == pb.Failure.NODE_FAILED
    assert "checksum" in failure.message
    assert checked.strict.counter("kv_checksum_failures") == 1


def test_announcements_without_digests_are_refused(checked: Checked) -> None:
    def strip(event: pb.PrefillEvent) -> tuple[pb.PrefillEvent]:
        if event.HasField("kv_ready"):
            del event.kv_ready.digests[:1]
        return (event,)

    checked.proxy.alter_event = strip
    with RouterClient(checked.strict.address) as client:
        failure = client.generate(prompt_of(4), greedy(10), checked.prefill.address).failure
    assert failure is not None
    assert "8 blocks with 7 digests" in failure.message


def test_an_announcement_without_blocks_is_refused(checked: Checked) -> None:
    def insert(event: pb.PrefillEvent) -> tuple[pb.PrefillEvent, ...]:
        if not event.HasField("kv_ready"):
            return (event,)
        ready = event.kv_ready
        return pb.PrefillEvent(kv_ready=pb.KVReady(lease_ms=ready.lease_ms)), event

    checked.proxy.alter_event = insert
    with RouterClient(checked.strict.address) as client:
        failure = client.generate(prompt_of(6), greedy(10), checked.prefill.address).failure
    assert failure is not None
    assert "announced 0 blocks" in failure.message


def test_nodes_with_different_checksum_modes_do_not_connect(checkpoint: Path, checked: Checked) -> None:
    with Fleet() as fleet:
        flags = ("--kv-checksum", "off", "--prefill", checked.proxy.address, "--peer-wait", "0.5")
        other = fleet.start_decode(checkpoint, [*FLAGS, *flags])
        fleet.wait_ready()
        assert list(other.describe().connected_peers) == []
        assert "kv_checksum: on here, off there" in other.output


def start_over(kind: str, tls: str, checkpoint: Path, fleet: Fleet, address: str) -> NodeProcess:
    flags = [*FLAGS, "--prefill", address, "--require-transport", kind, "--peer-wait", "20"]
    return fleet.start_decode(checkpoint, flags, {"UCX_TLS": tls})


@pytest.mark.slow
def test_a_transport_slower_than_required_fails_the_start(checkpoint: Path, checked: Checked) -> None:
    with Fleet() as fleet:
        node = start_over("shm", "tcp", checkpoint, fleet, checked.prefill.address)
        fleet.wait_until(lambda: node.child.state in ("failed", "ended"), 60.0)
        assert node.child.process.wait(patience(10.0)) == 2
        for word in (checked.prefill.address, "is tcp", "--require-transport asks for shm", "tcp/", "UCX_TLS"):
            assert word in node.child.last_error


@pytest.mark.slow
def test_a_transport_as_fast_as_required_connects(checkpoint: Path, checked: Checked) -> None:
    with Fleet() as fleet:
        node = start_over("shm", "tcp,cma", checkpoint, fleet, checked.prefill.address)
        fleet.wait_ready()
        assert list(node.describe().connected_peers) == [checked.prefill.address]


@pytest.mark.slow
def test_a_later_peer_with_a_slow_transport_is_refused_and_retried(checkpoint: Path, checked: Checked) -> None:
    with FaultProxy() as proxy, Fleet() as fleet:
        flags = [*FLAGS, "--prefill", proxy.address, "--peer-wait", "0.3"]
        node = fleet.start_decode(checkpoint, [*flags, "--require-transport", "rdma"])
        fleet.wait_ready()
        proxy.target = checked.prefill.address
        fleet.wait_until(lambda: "--require-transport asks for rdma" in node.output, 20.0)
        tries = checked.prefill.output.count("handshake")
        fleet.wait_until(lambda: checked.prefill.output.count("handshake") > tries, 20.0)
        assert list(node.describe().connected_peers) == []
        with RouterClient(node.address) as client:
            assert len(client.generate(prompt_of(5), greedy(4), checked.prefill.address).tokens) == 4
