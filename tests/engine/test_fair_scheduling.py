"""Fairness between clients on a node: order of admission, prompts in a step, slots, blocks and a full queue."""

from __future__ import annotations

from array import array

import pytest
from toy import reference
from toy_node import BATCH_TOKENS, Make, Node

from pdserve.ipc.messages import Cancel, Mode, Resume, Submit
from pdserve.sampling_params import SamplingParams

BUSY = 1
QUIET = 2


def finished_before(node: Node, rid: int) -> int:
    """Return how many choices ended before the first one of ``rid``."""
    return [ended for ended, _ in node.finished].index(rid)


@pytest.mark.parametrize("mode", [Mode.LOCAL, Mode.LEASE])
def test_short_request_passes_long_ones_of_another_client(make: Make, mode: Mode) -> None:
    node = make(400, max_num_seqs=2)
    for rid in range(50):
        node.submit(rid, [rid] * 30, SamplingParams(max_tokens=4), mode, client=BUSY)
    for _ in range(3):
        node.step()
    node.submit(99, [99] * 3, SamplingParams(max_tokens=4), mode, client=QUIET)
    node.run()
    assert finished_before(node, 99) <= 4
    busy = [rid for rid, _ in node.finished if rid != 99]
    assert busy == sorted(busy), "a client's requests stay in order"


def test_short_prompt_passes_a_long_one_that_is_being_computed(make: Make) -> None:
    node = make(400)
    node.submit(0, [1] * 40 * BATCH_TOKENS, SamplingParams(max_tokens=1), Mode.LOCAL, client=BUSY)
    for _ in range(5):
        node.step()
    node.submit(1, [2] * 4, SamplingParams(max_tokens=1), Mode.LOCAL, client=QUIET)
    node.submit(2, [3] * 4, SamplingParams(max_tokens=1), Mode.LOCAL, client=BUSY)
    node.run()
    assert [rid for rid, _ in node.finished] == [1, 0, 2]


def test_short_prompt_passes_many_long_ones_in_the_next_step(make: Make) -> None:
    node = make(900)
    for rid in range(20):
        node.submit(rid, [rid] * 10 * BATCH_TOKENS, SamplingParams(max_tokens=1), Mode.LEASE, client=BUSY)
    for _ in range(3):
        node.step()
    node.submit(99, [99] * 4, SamplingParams(max_tokens=1), Mode.LEASE, client=QUIET)
    for _ in range(6):
        node.step()
    assert [rid for rid, _ in node.finished] == [99]


def test_half_of_each_step_is_left_to_the_long_prompt(make: Make) -> None:
    """Short prompts of ever new clients slow it down to half."""
    node = make(400)
    node.submit(0, [1] * 10 * BATCH_TOKENS, SamplingParams(max_tokens=1), Mode.LOCAL)
    steps = 0
    while (0, 0) not in node.finished:
        for rid in range(1 + 9 * steps, 10 + 9 * steps):
            node.submit(rid, [rid] * 4, SamplingParams(max_tokens=1), Mode.LOCAL, client=rid)
        node.step()
        steps += 1
    assert steps <= 2 * 10 + 4
    node.run()


def test_client_with_few_sequences_gets_a_slot_while_many_choices_of_another_decode(make: Make) -> None:
    node = make(600, max_num_seqs=8)
    node.submit(0, [1] * 6, SamplingParams(max_tokens=200, n=8), Mode.LOCAL, client=BUSY)
    node.submit(1, [2] * 6, SamplingParams(max_tokens=200, n=8), Mode.LOCAL, client=BUSY)
    for _ in range(20):
        node.step()
    node.submit(2, [3] * 6, SamplingParams(max_tokens=4), Mode.LOCAL, client=QUIET)
    node.run(5000)
    assert finished_before(node, 2) == 0
    assert node.scheduler.status().totals.preemptions == 1
    for rid in (0, 1):
        for choice in range(8):
            assert node.tokens[rid, choice] == reference([1 + rid] * 6, choice, 200)
    node.assert_all_free()


def test_client_gets_blocks_that_another_holds(make: Make) -> None:
    node = make(60)
    for rid in range(4):
        node.submit(rid, [rid] * 50, SamplingParams(max_tokens=150), Mode.LOCAL, client=BUSY)
    for _ in range(10):
        node.step()
    node.submit(9, [9] * 40, SamplingParams(max_tokens=2), Mode.LOCAL, client=QUIET)
    node.run(5000)
    assert finished_before(node, 9) == 0
    node.assert_all_free()


@pytest.mark.parametrize(("busy", "priority"), [(2, 0), (8, -1)])
def test_nothing_is_preempted_from_an_equal_client_or_an_urgent_one(make: Make, busy: int, priority: int) -> None:
    """A client never loses a sequence to a client that would then have more than half as many."""
    node = make(400, max_num_seqs=busy)
    for rid in range(busy):
        node.submit(rid, [rid] * 6, SamplingParams(max_tokens=100), Mode.LOCAL, priority=priority, client=BUSY)
    for _ in range(10):
        node.step()
    node.submit(99, [99] * 6, SamplingParams(max_tokens=4), Mode.LOCAL, client=QUIET)
    node.run()
    assert finished_before(node, 99) >= 1
    assert node.scheduler.status().totals.preemptions == 0


def test_choices_that_wait_for_slots_do_not_pass_other_clients(make: Make) -> None:
    """The choices of two requests are 64 short sequences on two slots."""
    node = make(400, max_num_seqs=2)
    for rid in range(2):
        node.submit(rid, [rid] * 6, SamplingParams(max_tokens=30, n=2), Mode.LOCAL, client=BUSY)
    for rid in range(2, 34):
        node.submit(rid, [rid] * 6, SamplingParams(max_tokens=30, n=2), Mode.LOCAL, client=BUSY)
    for _ in range(5):
        node.step()
    node.submit(99, [99] * 6, SamplingParams(max_tokens=30), Mode.LOCAL, client=QUIET)
    node.run(5000)
    assert finished_before(node, 99) <= 4


def test_full_queue_refuses_the_last_request_of_the_client_that_fills_it(make: Make) -> None:
    node = make(400, max_num_seqs=1)
    for rid in range(100):
        node.submit(rid, [rid] * 6, SamplingParams(max_tokens=2), Mode.LOCAL, client=BUSY)
    node.submit(200, [9] * 6, SamplingParams(max_tokens=2), Mode.LOCAL, client=QUIET)
    node.submit(100, [100] * 6, SamplingParams(max_tokens=2), Mode.LOCAL, client=BUSY)
    refused = {entry.rid: entry.kind for entry in node.step().refused}
    assert refused == {99: "Overloaded", 100: "Overloaded"}
    node.run()
    assert finished_before(node, 200) <= 2
    assert len(node.finished) == 100
    node.assert_all_free()


def test_resumed_requests_go_before_new_ones_of_their_client(make: Make) -> None:
    """Clients have seen output of resumed requests; new requests wait, as behind a preempted request."""
    node = make(400, max_num_seqs=2)
    prompt = [7] * 9
    sampling = SamplingParams(max_tokens=8)
    for rid in range(30):
        node.submit(rid, [rid] * 30, SamplingParams(max_tokens=4), Mode.LOCAL)
    node.submit(99, prompt, sampling, Mode.LOCAL, resume={0: reference(prompt, 0, 3)})
    node.run()
    assert finished_before(node, 99) <= 4


def test_full_queue_takes_a_resumed_request(make: Make) -> None:
    """Else it would wait at the router, and fail there after 10 s."""
    node = make(400, max_num_seqs=1)
    prompt = [7] * 9
    sampling = SamplingParams(max_tokens=8)
    for rid in range(100):
        node.submit(rid, [rid] * 6, SamplingParams(max_tokens=2), Mode.LOCAL, client=BUSY)
    node.submit(200, prompt, sampling, Mode.LOCAL, client=BUSY, resume={0: reference(prompt, 0, 3)})
    assert not node.step().refused
    node.run()
    assert finished_before(node, 200) <= 2
    node.assert_all_free()


def test_new_request_displaces_no_resumed_one_from_a_full_queue(make: Make) -> None:
    node = make(400, max_num_seqs=1)
    prompt = [7] * 9
    sampling = SamplingParams(max_tokens=8)
    for rid in range(100):
        node.submit(rid, prompt, sampling, Mode.LOCAL, client=BUSY, resume={0: reference(prompt, 0, 3)})
    node.submit(200, [9] * 6, SamplingParams(max_tokens=2), Mode.LOCAL, client=QUIET)
    assert {entry.rid for entry in node.step().refused} == {200}


def test_resumed_request_that_arrived_paused_goes_before_new_ones(make: Make) -> None:
    node = make(400, max_num_seqs=2)
    prompt = [7] * 9
    sampling = SamplingParams(max_tokens=8)
    outputs = {0: array("I", reference(prompt, 0, 3)).tobytes()}
    message = Submit(99, array("I", prompt).tobytes(), sampling, Mode.LOCAL, resume=outputs, paused=True)
    node.obey(message)
    for rid in range(30):
        node.submit(rid, [rid] * 30, SamplingParams(max_tokens=4), Mode.LOCAL)
    node.obey(Resume(99))
    node.run()
    assert finished_before(node, 99) <= 4


def test_prompts_of_a_crowding_client_hardly_prolong_steps_in_which_others_decode(make: Make) -> None:
    """Prompts of the crowding client, and choices that recompute the prompt's end, get one token of each such step."""
    node = make(600, max_num_seqs=16)
    node.submit(0, [9] * 6, SamplingParams(max_tokens=150), Mode.LOCAL, client=QUIET)
    while not node.tokens[0, 0]:
        node.step()
    first = len(node.runner.launched)
    for rid in range(1, 4):
        node.submit(rid, [rid] * 31, SamplingParams(max_tokens=20, n=8), Mode.LOCAL, client=BUSY)
    node.run(5000)
    steps = [[item.num_tokens for item in plan.scheduled] for plan in node.runner.launched[first:]]
    beside = [step for step in steps if len(step) > 1]
    assert finished_before(node, 0) > 0
    assert sum(max(step) > 1 for step in beside) <= 4, "but for those after the end of the quiet request"
    for rid in range(1, 4):
        for choice in range(8):
            assert node.tokens[rid, choice] == reference([rid] * 31, choice, 20)


def test_crowding_client_stays_limited_for_a_while_after_the_other_has_ended(make: Make) -> None:
    """A client that sends one request after the other would find long steps in flight at each."""
    node = make(900, max_num_seqs=16)

    def longest_chunk(rid: int) -> int:
        first = len(node.runner.launched)
        node.submit(rid, [rid] * 31, SamplingParams(max_tokens=2), Mode.LOCAL, client=BUSY)
        while (rid, 0) not in node.finished:
            node.step()
        return max(item.num_tokens for plan in node.runner.launched[first:] for item in plan.scheduled)

    node.submit(1, [1] * 6, SamplingParams(max_tokens=600, n=8), Mode.LOCAL, client=BUSY)
    assert longest_chunk(2) > 1
    node.submit(0, [9] * 6, SamplingParams(max_tokens=40), Mode.LOCAL, client=QUIET)
    while not node.tokens[0, 0]:
        node.step()
    assert longest_chunk(3) == 1
    while (0, 0) not in node.finished:
        node.step()
    assert longest_chunk(4) == 1
    for _ in range(150):
        node.step()
    assert longest_chunk(5) > 1
    node.obey(Cancel(1))
    node.run()
