"""Adapters in the engine: requests are computed with their own, in few slots, and pass others that wait for one."""

from __future__ import annotations

import random
from array import array
from functools import partial
from typing import Any

import pytest
from fast_set import examples
from hypothesis import given
from hypothesis import strategies as st
from toy import ToyRunner, reference
from toy_node import BLOCK, DEPTHS, Make, Node, wait_until

from engine.adapters.adapter_slots import AdapterSlots
from engine.adapters.adapters import AdapterUsers
from pdserve.adapters.adapter import NO_ADAPTER, Adapter, AdapterLimits, AdapterModule
from pdserve.errors import CheckpointError
from pdserve.ipc.messages import (
    AdapterAdded,
    AddAdapter,
    Cancel,
    EventBatch,
    FreeLease,
    LeaseCached,
    Mode,
    Pause,
    PrefillLocally,
    RemoveAdapter,
    Resume,
)
from pdserve.sampling_params import SamplingParams

DIGESTS = [f"{number:064x}" for number in range(1, 5)]


def adapter(digest: str, rank: int = 8) -> Adapter:
    return Adapter(digest, "/adapters/a", {"q_proj": AdapterModule(rank, 1.0, "a", "b")})


def sampling(digest: str, max_tokens: int = 4, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, n=n, adapter=digest)


class SlotsWithClock:
    """An AdaptersFactory; the clock of its slots is ``now``."""

    def __init__(self, limits: AdapterLimits) -> None:
        self.now = 0.0
        self.limits = limits

    def __call__(self, users: AdapterUsers, events: EventBatch, clock: Any) -> AdapterSlots:
        return AdapterSlots(self.limits, users, events, lambda: self.now)


def with_slots(num_slots: int, in_memory: int = 8, rank: int = 16) -> partial[AdapterSlots]:
    return partial(AdapterSlots, AdapterLimits(num_slots, rank, in_memory))


def add(node: Node, digest: str, rank: int = 8) -> AdapterAdded:
    """Load an adapter; return the engine's answer."""
    answers: list[AdapterAdded] = []
    node.obey(AddAdapter(adapter(digest, rank)))

    def answered() -> bool:
        answers.extend(node.step().adapters)
        return bool(answers)

    wait_until(answered)
    return answers[0]


def refusals(node: Node) -> dict[int, str]:
    """Run one step; return the kinds of the refusals by rid."""
    return {refused.rid: refused.kind for refused in node.step().refused}


@pytest.mark.parametrize("depth", DEPTHS)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 24), st.integers(1, 10), st.integers(1, 3), st.booleans(), st.integers(-1, 3)),
        min_size=1,
        max_size=10,
    ),
    orders=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9), st.sampled_from("cprr")), max_size=16),
    num_blocks=st.integers(12, 40),
    num_slots=st.integers(1, 2),
    max_num_seqs=st.integers(1, 8),
    layered=st.booleans(),
)
@examples(25)
def test_requests_of_several_adapters_are_exact(
    depth: tuple[int, int],
    requests: list[tuple[int, int, int, bool, int]],
    orders: list[tuple[int, int, str]],
    num_blocks: int,
    num_slots: int,
    max_num_seqs: int,
    layered: bool,
) -> None:
    """Few slots and blocks, shared prompts, choices, cancels and pauses: each choice gets the tokens of its adapter."""
    node = Node(num_blocks, *depth, max_num_seqs=max_num_seqs, layered=layered, adapters=with_slots(num_slots))
    for digest in DIGESTS:
        assert not add(node, digest).kind
    expected: dict[tuple[int, int], list[int]] = {}
    for rid, (length, max_tokens, n, shared, number) in enumerate(requests):
        digest = NO_ADAPTER if number < 0 else DIGESTS[number]
        prompt = [7 if shared else rid] * length
        node.submit(rid, prompt, sampling(digest, max_tokens, n), Mode.LOCAL, client=rid % 2)
        expected |= {(rid, choice): reference(prompt, choice, max_tokens, adapter=digest) for choice in range(n)}
    cancelled = set()
    for step in range(41):
        for at, rid, order in orders:
            if at == step:
                node.obey(Cancel(rid) if order == "c" else Pause(rid) if order == "p" else Resume(rid))
                cancelled |= {rid} if order == "c" else set()
        node.step()
    for rid in range(len(requests)):
        node.obey(Resume(rid))
    node.run()
    for key, tokens in expected.items():
        got = node.tokens[key]
        assert got == tokens[: len(got)]
        assert key[0] in cancelled or got == tokens
    node.assert_all_free()
    for digest in DIGESTS:
        node.obey(RemoveAdapter(digest))
    node.run()
    assert not node.runner.adapters, "an adapter is left in host memory that no request uses"
    node.close()


def test_an_unknown_adapter_is_refused_and_never_computed_as_the_base(make: Make) -> None:
    node = make(40, adapters=with_slots(1))
    node.submit(1, [1] * 5, sampling(DIGESTS[0]), Mode.LOCAL)
    assert refusals(node) == {1: "AdapterMissing"}
    without = make(40)
    without.submit(1, [1] * 5, sampling(DIGESTS[0]), Mode.LOCAL)
    assert refusals(without) == {1: "AdapterMissing"}
    assert not node.tokens
    assert not without.tokens


def test_a_request_without_a_slot_lets_others_pass(make: Make) -> None:
    node = make(60, adapters=with_slots(1))
    for digest in DIGESTS[:2]:
        add(node, digest)
    node.submit(1, [1] * 5, sampling(DIGESTS[0], 40), Mode.LOCAL)
    node.step()
    node.submit(2, [2] * 5, sampling(DIGESTS[1], 4), Mode.LOCAL)
    node.submit(3, [3] * 5, sampling(DIGESTS[0], 4), Mode.LOCAL)
    node.submit(4, [4] * 5, sampling(NO_ADAPTER, 4), Mode.LOCAL)
    for _ in range(20):
        node.step()
    assert {(3, 0), (4, 0)} <= node.finished.keys()
    assert not node.tokens[2, 0]
    status = node.scheduler.status()
    assert (status.running_adapters, status.waiting_adapters) == ((DIGESTS[0],), (DIGESTS[1],))
    node.run()
    assert node.tokens[2, 0] == reference([2] * 5, 0, 4, adapter=DIGESTS[1])


def test_a_request_that_waits_long_for_a_slot_gets_one(make: Make) -> None:
    """Requests of the adapter that holds the slot come without end, and overlap."""
    slots = SlotsWithClock(AdapterLimits(1, 16, 8))
    node = make(80, adapters=slots)
    for digest in DIGESTS[:2]:
        add(node, digest)
    node.submit(0, [5] * 5, sampling(DIGESTS[0], 12), Mode.LOCAL)
    node.step()
    node.submit(1000, [1] * 5, sampling(DIGESTS[1], 3), Mode.LOCAL)
    for step in range(1, 60):
        if step % 6 == 0:
            node.submit(step, [step] * 5, sampling(DIGESTS[0], 12), Mode.LOCAL)
        node.step()
    assert (1000, 0) not in node.finished
    slots.now = 6.0
    for step in range(60, 120):
        if step % 6 == 0:
            node.submit(step, [step] * 5, sampling(DIGESTS[0], 12), Mode.LOCAL)
        node.step()
    assert node.tokens[1000, 0] == reference([1] * 5, 0, 3, adapter=DIGESTS[1])
    node.run()
    assert len(node.finished) == 21


def test_prompts_share_prefixes_only_under_one_adapter(make: Make) -> None:
    node = make(60, adapters=with_slots(2))
    for digest in DIGESTS[:2]:
        add(node, digest)
    prompt = list(range(4 * BLOCK + 1))
    cached = {}
    for rid, digest in enumerate((NO_ADAPTER, DIGESTS[0], DIGESTS[1], DIGESTS[0], NO_ADAPTER)):
        before = node.scheduler.totals.prefix_cached_tokens
        node.submit(rid, prompt, sampling(digest), Mode.LOCAL)
        node.run()
        cached[rid] = node.scheduler.totals.prefix_cached_tokens - before
    assert cached == {0: 0, 1: 0, 2: 0, 3: 4 * BLOCK, 4: 4 * BLOCK}


def test_a_removed_adapter_serves_the_requests_that_it_has(make: Make) -> None:
    node = make(60, adapters=with_slots(1))
    add(node, DIGESTS[0])
    node.submit(1, [1] * 5, sampling(DIGESTS[0], 12), Mode.LOCAL)
    node.step()
    node.obey(RemoveAdapter(DIGESTS[0]))
    node.submit(2, [1] * 5, sampling(DIGESTS[0]), Mode.LOCAL)
    assert refusals(node) == {2: "AdapterMissing"}
    assert node.runner.adapters
    node.run()
    assert node.tokens[1, 0] == reference([1] * 5, 0, 12, adapter=DIGESTS[0])
    assert not node.runner.adapters
    assert add(node, DIGESTS[0]) == AdapterAdded(DIGESTS[0])
    node.submit(3, [1] * 5, sampling(DIGESTS[0]), Mode.LOCAL)
    node.run()
    assert node.tokens[3, 0] == reference([1] * 5, 0, 4, adapter=DIGESTS[0])


def test_limits_of_adapters_are_errors_of_the_load(make: Make) -> None:
    node = make(40, adapters=with_slots(1, in_memory=2, rank=8))
    wide = add(node, DIGESTS[0], rank=16)
    assert (wide.kind, "rank 16, the limit is 8" in wide.message) == ("CheckpointError", True)
    for digest in DIGESTS[:2]:
        assert not add(node, digest).kind
    third = add(node, DIGESTS[2])
    assert (third.kind, "--max-cpu-loras" in third.message) == ("CapacityError", True)
    node.obey(RemoveAdapter(DIGESTS[0]))
    assert not add(node, DIGESTS[2]).kind
    without = make(40)
    assert add(without, DIGESTS[0]).kind == "ConfigError"


class FailingRunner(ToyRunner):
    def load_adapter(self, adapter: Adapter) -> None:
        raise CheckpointError("lora_A has 3 rows, the configuration says 8; save the adapter again")


def test_a_rank_that_fails_to_load_fails_the_load_and_nothing_else(make: Make) -> None:
    node = make(40, adapters=with_slots(1), runner=FailingRunner)
    node.submit(1, [1] * 5, sampling(NO_ADAPTER), Mode.LOCAL)
    answer = add(node, DIGESTS[0])
    assert (answer.kind, answer.message[:6]) == ("CheckpointError", "lora_A")
    node.submit(2, [1] * 5, sampling(DIGESTS[0]), Mode.LOCAL)
    assert refusals(node) == {2: "AdapterMissing"}
    node.run()
    assert node.tokens[1, 0] == reference([1] * 5, 0, 4)


def test_a_handoff_has_its_slot_before_its_kv_comes(make: Make) -> None:
    """The slot stays while the load waits, and is free once the request has been cancelled."""
    node = make(60, adapters=with_slots(1))
    for digest in DIGESTS[:2]:
        add(node, digest)
    node.submit(1, [1] * 9, sampling(DIGESTS[0]), Mode.HANDOFF)
    reserved = node.step().reserved
    assert [event.rid for event in reserved] == [1]
    node.submit(2, [2] * 9, sampling(DIGESTS[1]), Mode.HANDOFF)
    node.submit(3, [3] * 9, sampling(DIGESTS[1]), Mode.LOCAL)
    for _ in range(5):
        assert not node.step().reserved
    assert not node.tokens[3, 0]
    node.obey(PrefillLocally(1))
    events = [node.step() for _ in range(30)]
    assert [event.rid for batch in events for event in batch.reserved] == [2]
    assert node.tokens[1, 0] == reference([1] * 9, 0, 4, adapter=DIGESTS[0])
    assert node.tokens[3, 0] == reference([3] * 9, 0, 4, adapter=DIGESTS[1])
    node.obey(Cancel(2))
    node.submit(4, [4] * 9, sampling(DIGESTS[0]), Mode.LOCAL)
    node.run()
    assert node.tokens[4, 0] == reference([4] * 9, 0, 4, adapter=DIGESTS[0])
    node.assert_all_free()


def test_a_node_of_both_roles_refuses_a_peers_prompt_rather_than_wait_for_its_own_load(make: Make) -> None:
    """Else two such nodes might hold the slots for each other's prompts."""
    node = make(60, adapters=with_slots(1))
    for digest in DIGESTS[:2]:
        add(node, digest)
    node.submit(1, [1] * 9, sampling(DIGESTS[0]), Mode.HANDOFF)
    node.step()
    node.submit(2, [2] * 9, sampling(DIGESTS[1]), Mode.LEASE)
    assert refusals(node) == {2: "Overloaded"}
    node.obey(Cancel(1))
    node.run()
    node.obey(FreeLease(2))
    node.assert_all_free()


def test_leased_and_pulled_prompts_are_those_of_their_adapter(make: Make) -> None:
    """P computes with the adapter. A pull finds only KV of its adapter."""
    p = make(60, adapters=with_slots(1))
    for digest in DIGESTS[:2]:
        add(p, digest)
    rng = random.Random(1)
    for rid, digest in enumerate((DIGESTS[0], NO_ADAPTER, DIGESTS[1], DIGESTS[0])):
        prompt = [rng.randrange(900) for _ in range(4 * BLOCK + 2)]
        p.submit(rid, prompt, sampling(digest, 6), Mode.LEASE)
        p.run()
        first = p.tokens[rid, 0][0]
        assert [first] == reference(prompt, 0, 1, adapter=digest)
        for other in (NO_ADAPTER, *DIGESTS[:2]):
            pull = LeaseCached(100, array("I", prompt).tobytes(), "", 0, adapter=other)
            p.obey(pull)
            (leased,) = p.step().leased
            assert bool(leased.block_ids) == (other == digest)
            p.obey(FreeLease(100))
        p.obey(FreeLease(rid))
