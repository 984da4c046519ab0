"""Whole requests through one engine: with and without a step in flight beside the next one, with 1 to 3 stages."""

from __future__ import annotations

import time

import pytest
from fast_set import examples
from hypothesis import given
from hypothesis import strategies as st
from toy import reference, reference_ranks
from toy_node import BATCH_TOKENS, BLOCK, DEPTHS, Make, Node

from pdserve.config.simulated_costs import SimulatedCosts, SimulatedSteps
from pdserve.ipc.messages import Cancel, FreeLease, Leased, Mode, PrefillLocally, StartRead
from pdserve.records import FinishReason
from pdserve.sampling_params import SamplingParams

PRIORITIES = st.one_of(st.just(0), st.integers(-1, 1))


@pytest.mark.parametrize("depth", DEPTHS)
@given(
    requests=st.lists(
        st.tuples(
            *(st.integers(1, 30), st.integers(1, 12), st.integers(1, 3), st.booleans(), st.integers(0, 12)),
            *(PRIORITIES, st.integers(-1, 0)),
        ),
        min_size=1,
        max_size=12,
    ),
    num_blocks=st.integers(12, 40),
    itl_target=st.sampled_from([0.0, None, 0.02]),
    ttft_target=st.sampled_from([0.0, 1e-3, 0.5]),
    layered=st.booleans(),
)
@examples(60)
def test_local_requests_are_exact_under_preemption(
    depth: tuple[int, int],
    requests: list[tuple[int, int, int, bool, int, int, int]],
    num_blocks: int,
    itl_target: float | None,
    ttft_target: float,
    layered: bool,
) -> None:
    """Chunked prefill, shared prefixes, n choices, stops, too few blocks: every choice gets the reference's tokens.

    Log-probabilities of a prompt token are sent exactly once.
    """
    costs = SimulatedCosts(prompt_token=2e-3)
    node = Node(
        num_blocks,
        *depth,
        itl_target=itl_target,
        ttft_target=ttft_target,
        layered=layered,
        seconds=SimulatedSteps(costs).seconds,
    )
    expected = {}
    ranks = {}
    for rid, (length, max_tokens, n, shared, stop_at, priority, scored) in enumerate(requests):
        prompt = [7 if shared else rid] * length
        stop = tuple(reference(prompt, 0, stop_at)[-1:])
        sampling = SamplingParams(max_tokens=max_tokens, n=n, stop_token_ids=stop, prompt_logprobs=scored)
        node.submit(rid, prompt, sampling, Mode.LOCAL, priority=priority)
        if scored >= 0 and length > 1:
            ranks[rid] = reference_ranks(prompt)
        for choice in range(n):
            tokens = reference(prompt, choice, max_tokens, stop)
            stopped = tokens[-1] in stop
            expected[rid, choice] = tokens, FinishReason.STOP if stopped else FinishReason.LENGTH
    node.run()
    assert {key: (node.tokens[key], node.finished[key]) for key in expected} == expected
    assert node.ranks == ranks
    assert node.scheduler.status().totals.sampled_tokens == sum(len(tokens) for tokens, _ in expected.values())
    node.assert_all_free()
    node.close()


def test_status_tells_decodes_from_prompts_and_prompts_for_peers() -> None:
    node = Node(64, 1)
    node.submit(1, [1] * 4, SamplingParams(max_tokens=50), Mode.LOCAL)
    node.submit(2, [2] * 4, SamplingParams(max_tokens=50), Mode.LOCAL)
    node.step()
    node.submit(3, [3] * 3 * BATCH_TOKENS, SamplingParams(max_tokens=2), Mode.LEASE)
    seen = []
    for _ in range(6):
        status = node.scheduler.status()
        seen.append((status.waiting, status.running, status.decoding, status.for_peers))
        node.step()
    assert seen == [(1, 2, 2, 1), *[(0, 3, 2, 1)] * 3, *[(0, 2, 2, 0)] * 2]
    node.close()


def test_second_request_hits_the_prefix_cache_of_the_first(make: Make) -> None:
    node = make(40)
    prompt = list(range(22))
    for rid in range(2):
        node.submit(rid, prompt, SamplingParams(max_tokens=2), Mode.LOCAL)
        node.run()
    assert node.scheduler.status().totals.prefix_cached_tokens == 20
    assert node.tokens[0, 0] == node.tokens[1, 0] == reference(prompt, 0, 2)


def test_generated_tokens_enter_the_prefix_cache(make: Make) -> None:
    """The last token has no KV, the one before it fills a block."""
    node = make(40)
    prompt = list(range(BLOCK + 2))
    node.submit(0, prompt, SamplingParams(max_tokens=3), Mode.LOCAL)
    node.run()
    node.submit(1, [*prompt, *node.tokens[0, 0], 5], SamplingParams(max_tokens=1), Mode.LOCAL)
    node.run()
    assert node.scheduler.status().totals.prefix_cached_tokens == 2 * BLOCK


def test_choices_share_the_blocks_of_their_prompt(make: Make) -> None:
    node = make(40)
    node.submit(0, list(range(16)), SamplingParams(max_tokens=5, n=3), Mode.LOCAL)
    most = 0
    while not node.engine.idle:
        most = max(most, node.step().status.held)
    assert most <= 4 + 3 * 2  # the prompt once, and two blocks for each choice's five tokens


def test_too_long_prompts_and_a_full_queue_are_refused_at_once(make: Make) -> None:
    node = make(4)
    node.submit(0, [1] * 16, SamplingParams(max_tokens=1), Mode.LOCAL)
    for rid in range(1, 102):
        node.submit(rid, [1], SamplingParams(max_tokens=1), Mode.LOCAL)
    refused = {entry.rid: entry.kind for entry in node.step().refused}
    assert refused == {0: "RequestTooLong", 101: "Overloaded"}
    node.run()
    node.assert_all_free()


def test_admission_follows_priority_then_arrival(make: Make) -> None:
    node = make(40, max_num_seqs=1)
    for rid, priority in enumerate((0, 5, -3, 5, 0)):
        node.submit(rid, [rid] * 6, SamplingParams(max_tokens=2), Mode.LOCAL, priority=priority)
    node.run()
    assert [rid for rid, _ in node.finished] == [2, 0, 4, 1, 3]


def test_least_urgent_sequence_is_preempted_if_blocks_run_out(make: Make) -> None:
    node = make(6)
    for rid, priority in enumerate((1, 0)):
        node.submit(rid, [rid] * BLOCK, SamplingParams(max_tokens=16), Mode.LOCAL, priority=priority)
    node.run()
    assert node.scheduler.status().totals.preemptions > 0
    assert [rid for rid, _ in node.finished] == [1, 0]
    assert node.tokens == {(rid, 0): reference([rid] * BLOCK, 0, 16) for rid in (0, 1)}


def test_read_with_too_few_blocks_from_the_peer_is_refused(make: Make) -> None:
    node = make(16)
    node.submit(0, [1] * 10, SamplingParams(max_tokens=3), Mode.HANDOFF)
    assert [r.rid for r in node.step().reserved] == [0]
    node.obey(StartRead(0, "unknown", (1, 2), 10))
    (ended,) = node.step().reads
    assert "2 blocks where 3" in ended.result.error
    node.obey(PrefillLocally(0, ((5,),)))
    node.run()
    assert node.tokens[0, 0] == reference([1] * 10 + [5], 0, 2)  # P's first token stands
    node.assert_all_free()


@pytest.mark.parametrize("steps", range(8))
def test_cancel_frees_all_blocks_and_stops_output(make: Make, steps: int) -> None:
    """Cancelled while waiting, during prefill, when choices branch off, and while decoding."""
    node = make(16)
    node.submit(0, [1] * 30, SamplingParams(max_tokens=12, n=2), Mode.LOCAL)
    for _ in range(steps):
        node.step()
    before = {key: list(tokens) for key, tokens in node.tokens.items()}
    node.obey(Cancel(0))
    node.run()
    assert node.tokens == before, "a cancelled request has no further outputs"
    node.assert_all_free()


@pytest.mark.parametrize("steps", range(4))
def test_cancelled_prefills_are_not_leased(make: Make, steps: int) -> None:
    """Also if the last step of the prompt is in flight. Blocks that were announced stay leased."""
    node = make(16)
    node.submit(0, [1] * 20, SamplingParams(max_tokens=12), Mode.LEASE)
    leased = [lease for _ in range(steps) for lease in node.step().leased]
    first_result = min(node.runner.max_in_flight, 3)  # the third step would compute nothing
    assert [lease.num_tokens for lease in leased] == [16, 20][: max(0, steps + 1 - first_result)]
    node.obey(Cancel(0))
    while not node.engine.idle:
        assert not node.step().leased
    node.obey(FreeLease(0))
    node.assert_all_free()


@pytest.mark.parametrize(
    ("skip", "cached", "parts"),
    [
        (0, 0, [(16, 4), (32, 4), (42, 3)]),
        (20, 0, [(32, 3), (42, 3)]),
        (0, 24, [(40, 10), (42, 1)]),
        (12, 24, [(40, 7), (42, 1)]),
        (40, 0, [(42, 1)]),
        (0, 40, [(42, 11)]),
    ],
)
def test_full_blocks_are_leased_as_they_are_computed(
    make: Make, skip: int, cached: int, parts: list[tuple[int, int]]
) -> None:
    """Cached blocks are leased with the first computed ones; blocks that the peer has are skipped."""
    node = make(40)
    prompt = list(range(42))
    if cached:
        node.submit(0, prompt[:cached], SamplingParams(max_tokens=1), Mode.LOCAL)
        node.run()
    node.submit(1, prompt, SamplingParams(max_tokens=5), Mode.LEASE, skip)
    leased: list[Leased] = []
    while not node.engine.idle:
        batch = node.step()
        leased += batch.leased
        assert (1 in batch.outputs.rids) == any(part.num_tokens == 42 for part in batch.leased)
    assert [(part.num_tokens, len(part.block_ids)) for part in leased] == parts
    assert len(set(node.leased[1])) == node.scheduler.status().leased == 11 - skip // BLOCK
    node.obey(FreeLease(1))
    node.assert_all_free()


@pytest.mark.parametrize("messages", [(Cancel(1), FreeLease(1)), (FreeLease(1), Cancel(1), FreeLease(1))])
def test_lease_freed_during_prefill_frees_all_its_blocks(make: Make, messages: tuple[Cancel | FreeLease, ...]) -> None:
    """Only FreeLease does: a peer may read announced blocks, whether the rest is computed or not."""
    node = make(20)
    node.submit(1, [1] * 70, SamplingParams(max_tokens=5), Mode.LEASE)
    while not node.leased:
        node.step()
    for message in messages:
        before = node.scheduler.status().leased
        node.obey(message)
        assert node.scheduler.status().leased == (0 if isinstance(message, FreeLease) else before)
    while not node.engine.idle:
        assert not node.step().leased
    node.assert_all_free()


@pytest.mark.parametrize(
    "parts", [[(3, 12), (2, 13)], [(2, 8), (1, 13)], [(2, 8), (2, 8)], [(2, 7)], [(3, 8)], [(4, 16)]]
)
def test_announced_parts_that_do_not_fit_are_not_read(make: Make, parts: list[tuple[int, int]]) -> None:
    node = make(16)
    node.submit(0, [1] * 13, SamplingParams(max_tokens=3), Mode.HANDOFF)
    node.step()
    for num_blocks, num_tokens in parts:
        node.obey(StartRead(0, "unknown", tuple(range(num_blocks)), num_tokens))
    node.step()
    assert node.rank.num_reads == len(parts) - 1
    node.obey(PrefillLocally(0))
    node.run()
    while node.scheduler.status().quarantined:
        time.sleep(0.001)  # the connector's thread is at work
        node.step()
    assert node.tokens[0, 0] == reference([1] * 13, 0, 3)
    node.assert_all_free()


@pytest.mark.parametrize("mode", [Mode.LOCAL, Mode.LEASE])
def test_nothing_is_computed_beyond_the_last_token(make: Make, mode: Mode) -> None:
    node = make(40)
    node.submit(0, list(range(20)), SamplingParams(max_tokens=9), mode)
    node.run()
    assert node.runner.num_tokens == 20 + (8 if mode is Mode.LOCAL else 0)
    assert node.scheduler.status().totals.sampled_tokens == (9 if mode is Mode.LOCAL else 1)


@pytest.mark.parametrize(
    ("ahead", "sampling", "outputs"),
    [
        (0, SamplingParams(max_tokens=9), 1),
        (3, SamplingParams(max_tokens=9), 4),
        (30, SamplingParams(max_tokens=9), 9),
        (3, SamplingParams(max_tokens=2), 2),
        (3, SamplingParams(max_tokens=1), 1),
        (3, SamplingParams(max_tokens=9, n=2), 1),
        (9, SamplingParams(max_tokens=9, stop_token_ids=(reference(list(range(20)), 0, 3)[-1],)), 3),
        (9, SamplingParams(max_tokens=9, stop_token_ids=(reference(list(range(20)), 0, 1)[-1],)), 1),
    ],
)
def test_decode_ahead_samples_as_many_tokens_as_allowed(
    make: Make, ahead: int, sampling: SamplingParams, outputs: int
) -> None:
    """The limits are decode_ahead, max_tokens and stop tokens. Afterwards only leased blocks are held."""
    node = make(40)
    node.submit(0, list(range(20)), sampling, Mode.LEASE, decode_ahead=ahead)
    node.run()
    assert {choice: tokens for (_, choice), tokens in node.tokens.items()} == {
        choice: reference(list(range(20)), choice, outputs) for choice in range(sampling.n)
    }
    assert len(node.finished) == sampling.n, "each choice has a finish reason"
    status = node.scheduler.status()
    assert (status.leased, status.held, status.running) == (20 // BLOCK, 0, 0)
    node.obey(FreeLease(0))
    node.assert_all_free()


@pytest.mark.parametrize("length", [12, 40, 120])
@pytest.mark.parametrize("steps", range(9))
def test_decode_ahead_goes_on_beside_prompts(make: Make, steps: int, length: int) -> None:
    """After the end of a lease no token follows."""
    node = make(60)
    node.submit(0, list(range(20)), SamplingParams(max_tokens=40), Mode.LEASE, decode_ahead=30)
    for _ in range(steps):
        node.step()
    node.submit(1, [1] * length, SamplingParams(max_tokens=40), Mode.LEASE, decode_ahead=2)
    node.run()
    assert node.tokens[0, 0] == reference(list(range(20)), 0, 31)
    assert node.tokens[1, 0] == reference([1] * length, 0, 3)
    node.submit(2, [2] * 20, SamplingParams(max_tokens=40), Mode.LEASE, decode_ahead=30)
    while len(node.tokens[2, 0]) < 5:
        node.step()
    node.obey(FreeLease(2))
    node.run()
    assert node.tokens[2, 0] == reference([2] * 20, 0, 5)
    for rid in (0, 1):
        node.obey(FreeLease(rid))
    node.assert_all_free()


@pytest.mark.parametrize("options", [{"max_num_seqs": 1}, {"num_blocks": 10}], ids=["sequences", "blocks"])
def test_decode_ahead_ends_for_a_request_that_lacks_room(make: Make, options: dict[str, int]) -> None:
    node = make(**{"num_blocks": 60, **options})
    node.submit(0, list(range(16)), SamplingParams(max_tokens=40), Mode.LEASE, decode_ahead=30)
    while len(node.tokens[0, 0]) < 3:
        node.step()
    node.submit(1, [1] * 20, SamplingParams(max_tokens=4), Mode.LOCAL)
    node.run()
    assert node.tokens[1, 0] == reference([1] * 20, 0, 4)
    assert len(node.tokens[0, 0]) < 31
    assert (0, 0) in node.finished, "the end of decode-ahead was reported"


def test_decode_ahead_preempts_no_request(make: Make) -> None:
    """Decode-ahead stops if it lacks a block, and all leased blocks stay leased."""
    node = make(10)
    node.submit(0, [1] * 16, SamplingParams(max_tokens=40), Mode.LEASE, decode_ahead=30)
    node.submit(1, [2] * 8, SamplingParams(max_tokens=13), Mode.LOCAL)
    node.run()
    assert node.tokens[1, 0] == reference([2] * 8, 0, 13)
    assert node.scheduler.status().totals.preemptions == 0
    assert node.tokens[0, 0] == reference([1] * 16, 0, len(node.tokens[0, 0]))
    assert node.scheduler.status().leased == 4
    node.obey(FreeLease(0))
    node.assert_all_free()


def test_long_prompts_are_computed_one_after_the_other(make: Make) -> None:
    node = make(64, full_step=6)
    for rid, length in enumerate((20, 10, 9)):
        node.submit(rid, [rid] * length, SamplingParams(max_tokens=1), Mode.LOCAL)
    node.run()
    # Sequences are numbered from 1. Only what is left of the first prompt leaves room for a part of the second.
    shares = [{item.seq: item.num_tokens for item in plan.scheduled} for plan in node.runner.launched]
    assert [share for share in shares if share] == [{1: 16}, {1: 4, 2: 2}, {2: 8}, {3: 9}]


def test_short_prompts_are_computed_together(make: Make) -> None:
    node = make(64, full_step=6)
    for rid in range(4):
        node.submit(rid, [rid] * 3, SamplingParams(max_tokens=1), Mode.LOCAL)
    node.run()
    shares = [{item.seq: item.num_tokens for item in plan.scheduled} for plan in node.runner.launched]
    assert [share for share in shares if share] == [{1: 3, 2: 3}, {3: 3, 4: 3}]


def test_handoff_is_reserved_while_another_prompt_is_computed(make: Make) -> None:
    node = make(64)
    node.submit(0, [1] * 100, SamplingParams(max_tokens=1), Mode.LOCAL)
    node.submit(1, [2] * 20, SamplingParams(max_tokens=2), Mode.HANDOFF)
    assert [reserved.rid for reserved in node.step().reserved] == [1]


def test_engine_is_idle_while_all_sequences_wait_for_peers(make: Make) -> None:
    node = make(64, max_num_seqs=2)
    for rid in range(3):
        node.submit(rid, [rid] * 5, SamplingParams(max_tokens=2), Mode.HANDOFF)
    assert [reserved.rid for reserved in node.step().reserved] == [0, 1]
    assert node.engine.idle
    node.obey(Cancel(0))
    assert not node.engine.idle
    assert [reserved.rid for reserved in node.step().reserved] == [2]


def test_a_stop_token_frees_the_blocks_once_no_step_writes_to_them(make: Make, depth: tuple[int, int]) -> None:
    node = make(8)
    prompt = [3] * BLOCK
    stop = reference(prompt, 0, 3)[-1]
    node.submit(0, prompt, SamplingParams(max_tokens=20, stop_token_ids=(stop,)), Mode.LOCAL)
    while (0, 0) not in node.finished:
        status = node.step().status
    assert (status.running, status.held > 0) == (0, depth == (2, 1))  # with stages a step of others comes between
    node.run()
    assert node.tokens[0, 0] == reference(prompt, 0, 3)
    assert node.scheduler.status().totals.sampled_tokens == 3
    node.assert_all_free()
