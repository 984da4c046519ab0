"""Handoffs that fail at every stage: tokens are exact or the request fails, by the failure policy."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable

import pytest
from fault_proxy import Refusal
from node_client import PrefillClient, RouterClient, greedy
from node_fleet import FLAGS, Nodes

from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import pack_tokens, sampling_to_pb


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(3, 128) for _ in range(length)]


def once(action: Callable[[], None]) -> Callable[[], None]:
    """Return a hook that acts only once."""
    first = threading.Lock()
    return lambda: action() if first.acquire(blocking=False) else None


def refuse(code: pb.Failure.Code.ValueType) -> Callable[[], None]:
    def action() -> None:
        raise Refusal(code)

    return once(action)


def overwrite(nodes: Nodes) -> None:
    """Overwrite every block of ``short`` with KV of other prompts."""
    epoch = nodes.short.describe().epoch
    with PrefillClient(nodes.short.address) as client:
        for seed in range(8):
            tokens = pack_tokens(prompt_of(480, 1000 + seed))
            request = pb.PrefillRequest(epoch=epoch, token_ids=tokens, sampling=sampling_to_pb(greedy(1)))
            prefill = client.send(request)
            prefill.all()
            client.release(prefill)


def claim_a_minute(event: pb.PrefillEvent) -> tuple[pb.PrefillEvent]:
    if event.HasField("kv_ready"):
        event.kv_ready.lease_ms = 60_000
    return (event,)


def test_an_expired_lease_whose_blocks_were_overwritten_yields_no_token(nodes: Nodes) -> None:
    """D assumes too long a lease, as with a stopped clock, and reads KV of other prompts."""
    prompt = prompt_of(200, 1)

    def let_it_expire(kind: str) -> None:
        if kind == "kv_ready":
            nodes.short.wait_idle()
            overwrite(nodes)

    nodes.short_proxy.before_event = let_it_expire
    nodes.short_proxy.alter_event = claim_a_minute
    with RouterClient(nodes.decode.address) as client:
        expected = client.generate(prompt, greedy(40), cache_salt="local").tokens
        read = nodes.counter("kv_read_bytes")
        recomputed = nodes.counter("handoff_recomputes")
        assert client.generate(prompt, greedy(40), nodes.short.address).tokens == expected
    assert nodes.counter("kv_read_bytes") > read, "it did read the blocks"
    assert nodes.counter("handoff_recomputes") == recomputed + 1


@pytest.mark.parametrize("code", [pb.Failure.OVERLOADED, pb.Failure.NODE_FAILED])
def test_a_refused_prefill_is_recomputed_or_fails_by_policy(code: pb.Failure.Code.ValueType, nodes: Nodes) -> None:
    prompt = prompt_of(100, 3)
    with RouterClient(nodes.decode.address) as client:
        expected = client.generate(prompt, greedy(40), cache_salt=f"local {code}").tokens
        before = nodes.counter("handoff_failures"), nodes.counter("handoff_refusals")
        nodes.proxy.before_prefill = refuse(code)
        assert client.generate(prompt, greedy(40), nodes.main, cache_salt=str(code)).tokens == expected
        refused = code == pb.Failure.OVERLOADED
        assert nodes.counter("handoff_refusals") == before[1] + refused
        assert nodes.counter("handoff_failures") == before[0] + (not refused)
    with RouterClient(nodes.strict.address) as client:
        nodes.proxy.before_prefill = refuse(code)
        failure = client.generate(prompt, greedy(40), nodes.main, cache_salt=str(code)).failure
        assert failure is not None
        assert failure.code == code
        assert bool(failure.retry_after_ms) == (code == pb.Failure.OVERLOADED)
    nodes.wait_peers(nodes.decode, 2)
    nodes.wait_peers(nodes.strict, 2)


def test_pixels_that_p_lacks_are_for_the_router_whatever_the_policy(nodes: Nodes) -> None:
    """D lacks them, too, and P is not to blame: it stays connected."""
    prompt = prompt_of(100, 4)
    for node in (nodes.decode, nodes.strict):
        recomputed = node.counter("handoff_recomputes")
        with RouterClient(node.address) as client:
            nodes.proxy.before_prefill = refuse(pb.Failure.NEEDS_IMAGES)
            failure = client.generate(prompt, greedy(4), nodes.main, cache_salt="images").failure
            assert failure is not None
            assert failure.code == pb.Failure.NEEDS_IMAGES
            assert "refused by the test" in failure.message
            assert client.generate(prompt, greedy(4), nodes.main, cache_salt="images").tokens
        assert node.counter("handoff_recomputes") == recomputed
        assert len(node.describe().connected_peers) == 2


def test_an_unconfirmed_read_is_not_used(nodes: Nodes) -> None:
    prompt = prompt_of(100, 4)
    with RouterClient(nodes.decode.address) as client:
        expected = client.generate(prompt, greedy(40), cache_salt="local").tokens
        nodes.proxy.before_release = refuse(pb.Failure.NODE_FAILED)
        assert client.generate(prompt, greedy(40), nodes.main).tokens == expected
    with RouterClient(nodes.strict.address) as client:
        nodes.proxy.before_release = refuse(pb.Failure.NODE_FAILED)
        failure = client.generate(prompt, greedy(40), nodes.main).failure
        assert failure is not None
        assert failure.code == pb.Failure.NODE_FAILED


@pytest.mark.slow
def test_a_prefill_node_of_another_block_size_is_not_connected(nodes: Nodes) -> None:
    """The handshake fails and names both sizes."""
    other = nodes.decodes.start_decode(
        nodes.checkpoint,
        [*FLAGS, "--block-size", "16", "--prefill", nodes.proxy.address, "--peer-wait", "0.5"],
    )
    nodes.decodes.wait_ready()
    assert list(other.describe().connected_peers) == []
    assert "block_size: 8 here, 16 there" in other.output
    with RouterClient(other.address) as client:
        assert len(client.generate(prompt_of(100, 6), greedy(5), nodes.main).tokens) == 5
    other.signal(signal.SIGTERM)
