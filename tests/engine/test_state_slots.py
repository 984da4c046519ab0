"""Recurrent state: each sequence continues from the state of its own tokens, wherever these were computed.

The toy runner asserts that before each sample. Here all blocks and slots are few, and prompts share prefixes.
"""

from __future__ import annotations

import pytest
from fast_set import examples
from hypothesis import given
from hypothesis import strategies as st
from scripted_world import STAGES, ScriptedJob, ScriptedWorld
from toy import reference
from toy_node import BLOCK, DEPTHS, Make, Node

from engine.kv_cache.block_pool import Use
from engine.recurrent import state_slots
from pdserve.ipc.messages import Cancel, Mode, Pause, Resume
from pdserve.sampling_params import SamplingParams

each_depth = pytest.mark.parametrize("depth", DEPTHS, ids=str)


@pytest.fixture(autouse=True)
def short_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_slots, "DISTANCE", 3 * BLOCK)
    monkeypatch.setattr(state_slots, "DECODE_DISTANCE", 2 * BLOCK)


def serve(node: Node, rid: int, prompt: list[int], max_tokens: int, n: int = 1) -> int:
    """Serve a request alone. Return how many tokens were computed for it."""
    before = node.runner.num_tokens
    node.submit(rid, prompt, SamplingParams(max_tokens=max_tokens, n=n), Mode.LOCAL)
    node.run()
    for choice in range(n):
        assert node.tokens[rid, choice] == reference(prompt, choice, max_tokens)
    return node.runner.num_tokens - before


def answer(world: ScriptedWorld, num_tokens: int) -> None:
    """Step until D has answered its only request with ``num_tokens`` tokens."""
    for _ in range(3000):
        if len(world.d.node.tokens[1, 0]) >= num_tokens:
            return
        world._step()
    raise AssertionError("the request is not answered")


@each_depth
@given(
    requests=st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 2), st.integers(1, 14)), min_size=1, max_size=4),
            st.integers(1, 20),
            st.integers(1, 3),
            st.integers(0, 12),
            st.none() | st.integers(1, 25),
        ),
        min_size=1,
        max_size=10,
    ),
    num_blocks=st.integers(24, 60),
    num_slots=st.integers(3, 12),
)
@examples(60)
def test_tokens_are_exact_with_few_slots_and_shared_prefixes(
    depth: tuple[int, int],
    requests: list[tuple[list[tuple[int, int]], int, int, int, int | None]],
    num_blocks: int,
    num_slots: int,
) -> None:
    """Sequences wait for slots and blocks, are preempted and cancelled; snapshots come and go."""
    node = Node(num_blocks, *depth, state_slots=num_slots)
    due = sorted((arrival, rid) for rid, (_, _, _, arrival, _) in enumerate(requests, 1))
    prompts = [[token for token, count in runs for _ in range(count)] for runs, *_ in requests]
    cancelled = set()
    for step in range(3000):
        while due and due[0][0] <= step:
            rid = due.pop(0)[1]
            _, max_tokens, n, _, _ = requests[rid - 1]
            node.submit(rid, prompts[rid - 1], SamplingParams(max_tokens=max_tokens, n=n), Mode.LOCAL)
        for rid, (_, _, _, arrival, lifetime) in enumerate(requests, 1):
            if lifetime is not None and step == arrival + lifetime:
                cancelled.add(rid)
                node.obey(Cancel(rid))
        if not due and node.engine.idle:
            break
        node.step()
    assert node.scheduler.status().state_slots == (num_slots, 0, 0, 0)
    for rid, (_, max_tokens, n, _, _) in enumerate(requests, 1):
        for choice in range(n):
            tokens = node.tokens[rid, choice]
            expected = reference(prompts[rid - 1], choice, max_tokens)
            assert tokens == (expected[: len(tokens)] if rid in cancelled else expected)
    node.assert_all_free()
    node.close()


@each_depth
@pytest.mark.parametrize("checksum", [False, True], ids=["", "checksum"])
@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 60),
            st.integers(1, 3),
            st.booleans(),
            st.sampled_from(["cancel", "give up", "break", "expire", "pause"]),
            st.sampled_from(["never", "never", *STAGES]) | st.integers(1, 60),
            st.sampled_from([0, 0, 1, 9]),
            st.booleans(),
        ),
        min_size=1,
        max_size=8,
    ),
    slots=st.tuples(st.integers(3, 20), st.integers(3, 12)),
    drafts=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
@examples(20)
def test_states_are_handed_off_with_a_fault_at_any_stage(
    depth: tuple[int, int],
    checksum: bool,
    requests: list[tuple[int, int, bool, str, str | int, int, bool]],
    slots: tuple[int, int],
    drafts: tuple[int, int],
) -> None:
    jobs = [
        ScriptedJob(
            [7 if shared else rid] * length,
            SamplingParams(max_tokens=6, n=n),
            what=what,
            when=when,
            ahead=ahead,
            pull=pull,
            done=4 if pull else 0,
            arrival=40 if pull else 0,
        )
        for rid, (length, n, shared, what, when, ahead, pull) in enumerate(requests)
    ]
    world = ScriptedWorld(
        depth, (96, 72), jobs, checksum=checksum, state_slots=slots, drafts=drafts, planned_drafts=True
    )
    world.run()
    world.close()


@each_depth
@pytest.mark.parametrize("length", [5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1])
@pytest.mark.parametrize("ahead", [0, 9])
def test_stream_that_is_paused_behind_a_handoff_goes_on_from_its_last_token(
    depth: tuple[int, int], length: int, ahead: int
) -> None:
    """Also one whose state arrived at a block boundary, and was a snapshot at once."""
    job = ScriptedJob(list(range(length)), SamplingParams(max_tokens=30), ahead=ahead)
    world = ScriptedWorld(depth, (96, 72), [job], state_slots=(4, 4))
    answer(world, 13)
    world.d.node.obey(Pause(1))
    world.d.node.obey(Resume(1))
    world.run()
    world.close()


@pytest.mark.parametrize("pull", [False, True])
def test_stream_holds_one_slot_behind_a_load(pull: bool) -> None:
    """And for moments one more: for a snapshot."""
    sampling = SamplingParams(max_tokens=30)
    job = ScriptedJob(list(range(5 * BLOCK)), sampling, done=5 if pull else 0, pull=pull, arrival=40 if pull else 0)
    world = ScriptedWorld((2, 1), (96, 72), [job], state_slots=(20, 20))
    answer(world, 3)
    states = world.d.node.scheduler.states
    held = []
    for _ in range(5):
        world._step()
        held.append(states.pool.count(Use.HELD))
    assert min(held) == 1
    world.run()
    world.close()


@each_depth
@pytest.mark.parametrize("slots", [3, 12])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("count", [1, 2])
def test_prompt_that_begins_with_a_pulled_state_leases_that_of_its_own(
    depth: tuple[int, int], slots: int, n: int, count: int
) -> None:
    """Several choices are leased the state at the last block boundary, where the pull ends.

    The state may be cached already, as of the same prompt twice, and there may be no slot for a snapshot.
    """
    prompt = list(range(5 * BLOCK + 1))
    sampling = SamplingParams(max_tokens=1, n=n)
    job = ScriptedJob(prompt, sampling, Mode.PULL_AND_LEASE, pull=True, arrival=40)
    world = ScriptedWorld(depth, (96, 72), [job] * count, state_slots=(20, slots))
    world.run()
    world.close()


def test_next_turn_computes_only_what_is_new(make: Make) -> None:
    """The next turn hits the stream's last snapshot, at most ``DECODE_DISTANCE`` tokens before the stream's end."""
    node = make(200, state_slots=20)
    prompt = list(range(50))
    serve(node, 1, prompt, 30)
    longer = [*prompt, *reference(prompt, 0, 30), *range(500, 510)]
    assert serve(node, 2, longer, 1) <= 10 + 2 * BLOCK


def test_retry_computes_the_last_block_only(make: Make) -> None:
    node = make(200, state_slots=20)
    prompt = list(range(50))
    serve(node, 1, prompt, 1)
    assert serve(node, 2, prompt, 1) == 2


def test_a_snapshot_takes_no_step_of_its_own(make: Make) -> None:
    """The last block boundary of the prompt lies amid the only chunk, and what follows hits it all the same."""
    node = make(200, state_slots=20)
    prompt = list(range(3 * BLOCK + 1))
    serve(node, 1, prompt, 1)
    assert sum(plan.num_prompt_tokens > 0 for plan in node.runner.launched) == 1
    assert serve(node, 2, [*prompt, 7], 1) == 2


def test_third_prompt_hits_where_the_second_one_branched_off(make: Make) -> None:
    node = make(200, state_slots=20)
    shared = list(range(4 * BLOCK))  # no multiple of DISTANCE
    serve(node, 1, [*shared, *[1] * 20], 1)
    serve(node, 2, [*shared, *[2] * 20], 1)
    assert serve(node, 3, [*shared, *[3] * 20], 1) == 20


def test_choices_share_the_prompt(make: Make) -> None:
    node = make(200, state_slots=20)
    assert serve(node, 1, list(range(50)), 1, n=3) == 50
    assert serve(node, 2, list(range(100, 150)), 2, n=3) == 50 + 3 + 2 * 2


@each_depth
@pytest.mark.parametrize("ahead", [0, 9])
def test_handoff_brings_the_state_and_d_computes_nothing_of_the_prompt(depth: tuple[int, int], ahead: int) -> None:
    job = ScriptedJob(list(range(45)), SamplingParams(max_tokens=6), ahead=ahead)
    world = ScriptedWorld(depth, (96, 72), [job], state_slots=(4, 3))
    world.run()
    assert world.d.node.runner.num_tokens <= 5
    world.close()


@each_depth
@pytest.mark.parametrize("length", [5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1, BLOCK - 1])
@pytest.mark.parametrize("done", [0, 4])
def test_choices_start_from_the_state_that_was_received(depth: tuple[int, int], length: int, done: int) -> None:
    """``done``: tokens of each choice that another D has produced. Each choice computes the rest of the last block."""
    job = ScriptedJob(list(range(length)), SamplingParams(n=3, max_tokens=6), done=done)
    world = ScriptedWorld(depth, (96, 72), [job], state_slots=(4, 8))
    world.run()
    assert world.d.node.runner.num_tokens <= 3 * (length % BLOCK + 5)
    world.close()


@each_depth
def test_choices_start_from_a_state_that_p_had_cached(depth: tuple[int, int]) -> None:
    prompt = list(range(5 * BLOCK + 3))
    sampling = SamplingParams(n=2, max_tokens=6)
    jobs = [ScriptedJob(prompt, sampling), ScriptedJob(prompt, sampling, arrival=40)]
    world = ScriptedWorld(depth, (96, 72), jobs, state_slots=(8, 8))
    world.run()
    assert world.p.node.runner.num_tokens == len(prompt) + 3
    world.close()


def test_choices_resumed_without_a_peer_share_the_prompt(make: Make) -> None:
    node = make(200, state_slots=20)
    prompt = list(range(5 * BLOCK + 3))
    resume = {choice: reference(prompt, choice, 2 * BLOCK) for choice in range(3)}
    sampling = SamplingParams(n=3, max_tokens=2 * BLOCK + 1)
    node.submit(1, prompt, sampling, Mode.LOCAL, resume=resume)
    node.run()
    for choice in range(3):
        assert node.tokens[1, choice] == reference(prompt, choice, 2 * BLOCK + 1)[2 * BLOCK :]
    assert node.runner.num_tokens == 5 * BLOCK + 3 * (3 + 2 * BLOCK)


def test_peer_without_recurrent_state_is_refused() -> None:
    from connector.planning.rank_mapping import LocalRank
    from pdserve.errors import PeerError
    from pdserve.records import Peer

    with_states = Node(16, 1, state_slots=4)
    without = Node(16, 1)
    for ours, theirs in ((with_states, without), (without, with_states)):
        rank = LocalRank(states=ours.runner.rank_states)
        with pytest.raises(PeerError, match="no recurrent state"):
            rank.source_ranks(ours.runner.kv_layout, Peer("node", "e1", (theirs.kv,)))
    with_states.close()
    without.close()
