"""Prompts that a prefill node computes in many steps, and what may happen between the parts that it announces."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import pytest
from fault_proxy import FaultProxy
from fleet import Fleet, NodeProcess
from node_client import RouterClient, greedy, prefill_stub
from node_fleet import FLAGS

from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import SamplingParams
from pdserve.wire import pack_tokens, sampling_to_pb

BLOCK, STEP, LENGTH = 8, 64, 300  # tokens: of a block, a step of the prefill node and the prompts here
BLOCK_BYTES = 2 * 2 * 2 * BLOCK * 32 * 4  # layers, heads, K and V, tokens, head size, float32
STEPWISE = [*FLAGS, "--max-batch-tokens", str(STEP), "--max-num-seqs", "8", "--lease-seconds", "4"]


def prompt_of(seed: int, length: int = LENGTH) -> list[int]:
    rng = random.Random(f"streamed {seed}")
    return [rng.randrange(3, 128) for _ in range(length)]


def on_part(number: int, action: Callable[[], None]) -> Callable[[str], None]:
    """A hook that acts before the ``number``-th announcement of blocks (from 1) is passed on."""
    seen: list[str] = []

    def hook(kind: str) -> None:
        seen.append(kind)
        if kind == "kv_ready" and seen.count(kind) == number:
            action()

    return hook


@dataclass
class Pair:
    """A prefill node of small steps, a proxy, and a decode node that recomputes what fails."""

    prefills: Fleet
    decodes: Fleet
    proxy: FaultProxy

    @property
    def prefill(self) -> NodeProcess:
        return self.prefills.prefill[0]

    @property
    def decode(self) -> NodeProcess:
        return self.decodes.decode[0]

    def settle(self) -> None:
        """Both alive, connected and idle, and nobody between them."""
        self.proxy.reset()
        for node in (self.prefill, self.decode):
            if node.child.state == "ended":
                node.restart()
            node.wait_idle()
        epoch = self.prefill.describe().epoch
        self.decodes.wait_until(lambda: f"epoch {epoch}" in self.decode.output, 20.0)


@pytest.fixture(scope="module")
def started(checkpoint: Path) -> Iterator[Pair]:
    with Fleet() as prefills, Fleet() as decodes, FaultProxy() as proxy:
        proxy.target = prefills.start_prefill(checkpoint, STEPWISE).address
        decodes.start_decode(checkpoint, [*FLAGS, "--prefill", proxy.address])
        prefills.wait_ready()
        decodes.wait_ready()
        yield Pair(prefills, decodes, proxy)


@pytest.fixture
def pair(started: Pair) -> Iterator[Pair]:
    """Whatever happens to it in a test, both nodes are idle afterwards."""
    started.decodes.wait_until(lambda: len(started.decode.describe().connected_peers) == 1, 20.0)
    yield started
    started.settle()


def test_what_is_announced_has_been_read_before_the_prompt_is_done(pair: Pair) -> None:
    """All but the last part, and only once: the first tokens are held back until D has read it."""
    prompt, before = prompt_of(1), pair.decode.counter("kv_read_bytes")

    def num_read() -> float:
        return (pair.decode.counter("kv_read_bytes") - before) / BLOCK_BYTES

    def wait_for_reads(kind: str) -> None:
        if kind == "first_tokens":
            pair.decodes.wait_until(lambda: num_read() == LENGTH // STEP * STEP // BLOCK, 10.0)

    pair.proxy.before_event = wait_for_reads
    with RouterClient(pair.decode.address) as client:
        expected = client.generate(prompt, greedy(12), cache_salt="local").tokens
        failures = pair.decode.counter("handoff_failures")
        assert client.generate(prompt, greedy(12), pair.prefill.address).tokens == expected
    assert num_read() == -(-LENGTH // BLOCK)
    assert pair.decode.counter("handoff_failures") == failures


def test_parts_are_announced_in_order_under_one_lease(pair: Pair) -> None:
    epoch = pair.prefill.describe().epoch
    request = pb.PrefillRequest(
        epoch=epoch, token_ids=pack_tokens(prompt_of(2)), sampling=sampling_to_pb(greedy(4)), skip_tokens=2 * BLOCK
    )
    with prefill_stub(pair.prefill.address) as stub:
        accepted, *parts, first, last = list(stub.Prefill(request, timeout=20.0))
        parts.append(last)
        assert len(first.first_tokens.choices) == 1
        assert [part.kv_ready.num_tokens for part in parts] == [64, 128, 192, 256, LENGTH]
        assert {part.kv_ready.lease for part in parts} == {accepted.accepted.lease}
        blocks = [block for part in parts for block in part.kv_ready.block_ids]
        assert len(blocks) == len(set(blocks)) == -(-LENGTH // BLOCK) - 2
        assert pair.prefill.status().leased_blocks == len(blocks)
        assert stub.Release(pb.ReleaseRequest(epoch=epoch, lease=accepted.accepted.lease)).stood
        pair.prefill.wait_idle()


def test_calls_and_leases_that_end_between_parts_leave_nothing(pair: Pair) -> None:
    """A call that is given up after any number of events; a lease that is released while its call goes on."""
    epoch = pair.prefill.describe().epoch
    with prefill_stub(pair.prefill.address) as stub:
        for index in range(12):
            prompt = pack_tokens(prompt_of(100 + index, 500))
            call: Any = stub.Prefill(
                pb.PrefillRequest(epoch=epoch, token_ids=prompt, sampling=sampling_to_pb(greedy(1)))
            )
            events = list(islice(call, 1 + index // 2))
            if index % 2:
                stub.Release(pb.ReleaseRequest(epoch=epoch, lease=events[0].accepted.lease))
                with contextlib.suppress(grpc.RpcError):  # P ends a call whose lease is gone
                    list(call)
            else:
                call.cancel()
    pair.prefill.wait_idle()
    granted = pair.prefill.counter("leases_granted")
    assert granted == sum(pair.prefill.counter(f"leases_{end}") for end in ("released", "expired", "aborted"))


def test_choices_and_a_cached_prefix(pair: Pair) -> None:
    sampling = SamplingParams(max_tokens=8, n=3, temperature=1.0, seed=7, ignore_eos=True)
    prompt = prompt_of(3)
    with RouterClient(pair.decode.address) as client:
        local = client.generate(prompt, sampling, cache_salt="local").choices
        client.generate(prompt[: 10 * BLOCK], greedy(2))
        before = pair.decode.counter("kv_read_bytes")
        assert client.generate(prompt, sampling, pair.prefill.address).choices == local
        assert pair.decode.counter("kv_read_bytes") - before == (-(-LENGTH // BLOCK) - 10) * BLOCK_BYTES


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_prefill_node_that_is_killed_between_parts(number: int, pair: Pair) -> None:
    pair.proxy.before_event = on_part(number, pair.prefill.kill)
    prompt = prompt_of(4)
    with RouterClient(pair.decode.address) as client:
        expected = client.generate(prompt, greedy(10), cache_salt="local").tokens
        recomputes = pair.decode.counter("handoff_recomputes")
        assert client.generate(prompt, greedy(10), pair.prefill.address, cache_salt=f"at {number}").tokens == expected
        assert pair.prefill.child.state == "ended"
        assert pair.decode.counter("handoff_recomputes") == recomputes + 1


def test_a_request_that_is_cancelled_between_parts(pair: Pair) -> None:
    reached, idle = threading.Event(), threading.Event()

    def pause() -> None:
        reached.set()
        assert idle.wait(20.0)

    pair.proxy.before_event = on_part(3, pause)
    with RouterClient(pair.decode.address) as client:
        result = client.send(prompt_of(5), greedy(10), pair.prefill.address)
        assert reached.wait(20.0)
        client.cancel(result)
        pair.decode.wait_idle()
        idle.set()
        pair.prefill.wait_idle()
        assert result.choices == {}
        pair.proxy.reset()
        assert len(client.generate(prompt_of(5), greedy(10), pair.prefill.address).tokens) == 10


def test_a_decode_node_that_is_killed_between_parts(pair: Pair) -> None:
    """The lease ends with the call, or by itself where P has announced everything already."""
    pair.proxy.before_event = on_part(2, pair.decode.kill)
    with RouterClient(pair.decode.address) as client:
        client.send(prompt_of(6), greedy(10), pair.prefill.address)
        client.join()
    pair.decodes.wait_until(lambda: pair.decode.child.state == "ended", 5.0)
    pair.prefill.wait_idle()
