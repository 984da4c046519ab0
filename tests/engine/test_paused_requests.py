"""Paused requests: no step includes them, others get their slots and blocks, and they continue with the same tokens."""

from __future__ import annotations

import time
from array import array
from typing import Any

import pytest
from fast_set import examples
from hypothesis import given
from hypothesis import strategies as st
from test_grammar_masks import LETTERS, workers
from toy import reference, reference_ranks
from toy_node import BLOCK, DEPTHS, Make, Node

from pdserve.ipc.messages import Cancel, Mode, Pause, PrefillLocally, Resume, Submit
from pdserve.sampling_params import SamplingParams


@pytest.mark.parametrize("depth", DEPTHS)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(1, 3), st.booleans(), st.integers(-1, 0)),
        min_size=1,
        max_size=8,
    ),
    pauses=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 7), st.booleans()), max_size=40),
    num_blocks=st.integers(12, 40),
    max_num_seqs=st.integers(1, 8),
    layered=st.booleans(),
)
@examples(60)
def test_paused_requests_are_exact(
    depth: tuple[int, int],
    requests: list[tuple[int, int, int, bool, int]],
    pauses: list[tuple[int, int, bool]],
    num_blocks: int,
    max_num_seqs: int,
    layered: bool,
) -> None:
    """Pause and resume at any step, with chunked prompts, n choices, and too few slots or blocks."""
    node = Node(num_blocks, *depth, max_num_seqs=max_num_seqs, layered=layered)
    expected: dict[tuple[int, int], list[int]] = {}
    ranks = {}
    for rid, (length, max_tokens, n, shared, scored) in enumerate(requests):
        prompt = [7 if shared else rid] * length
        sampling = SamplingParams(max_tokens=max_tokens, n=n, prompt_logprobs=scored)
        node.submit(rid, prompt, sampling, Mode.LOCAL, client=rid % 2)
        if scored >= 0 and length > 1:
            ranks[rid] = reference_ranks(prompt)
        expected |= {(rid, choice): reference(prompt, choice, max_tokens) for choice in range(n)}
    for step in range(31):
        for at, rid, paused in pauses:
            if at == step:
                node.obey(Pause(rid) if paused else Resume(rid))
        node.step()
    node.run()  # the others end, and then nothing is left to do
    for rid in range(len(requests)):
        node.obey(Resume(rid))
    node.run()
    assert node.tokens == expected
    assert node.ranks == ranks
    node.assert_all_free()
    node.close()


def start(node: Node, rid: int, **sampling: Any) -> None:
    """Submit a request of 2 + 20 tokens and let it decode some."""
    node.submit(rid, [rid, rid], SamplingParams(**{"max_tokens": 20, **sampling}), Mode.LOCAL)
    for _ in range(8):
        node.step()


def test_paused_request_gets_only_the_tokens_in_flight(make: Make) -> None:
    node = make(40)
    start(node, 0, n=2)
    before = len(node.tokens[0, 0]) + len(node.tokens[0, 1])
    node.obey(Pause(0))
    node.run()
    status = node.scheduler.status()
    assert (status.running, status.waiting, status.paused) == (0, 0, 2)
    assert len(node.tokens[0, 0]) + len(node.tokens[0, 1]) <= before + 2 * node.runner.max_in_flight
    num_computed = node.runner.num_tokens
    node.obey(Resume(0))
    node.run()
    assert node.tokens == {(0, choice): reference([0, 0], choice, 20) for choice in (0, 1)}
    left = 2 * 20 - before
    assert node.runner.num_tokens - num_computed <= left, "its KV was kept"
    node.assert_all_free()


def test_request_paused_and_resumed_before_every_step(make: Make) -> None:
    """Results in flight are applied before the request continues, results of its prompt too."""
    node = make(40)
    prompt = list(range(50))
    node.submit(0, prompt, SamplingParams(max_tokens=9, n=2, prompt_logprobs=0), Mode.LOCAL)
    while len(node.finished) < 2:
        node.obey(Pause(0))
        node.obey(Resume(0))
        node.step()
    assert node.tokens == {(0, choice): reference(prompt, choice, 9) for choice in (0, 1)}
    assert node.ranks == {0: reference_ranks(prompt)}


def test_request_that_arrives_paused_is_in_no_step_until_it_is_resumed(make: Make) -> None:
    node = make(64)
    paused = make(64)
    start(node, 7)
    node.run()
    sampling = SamplingParams(max_tokens=20)
    paused.obey(Submit(7, array("I", [7, 7]).tobytes(), sampling, Mode.LOCAL, paused=True))
    paused.run()
    assert paused.runner.num_tokens == 0
    assert paused.scheduler.status().paused == 1
    paused.obey(Resume(7))
    paused.run()
    assert paused.tokens[7, 0] == node.tokens[7, 0]
    paused.assert_all_free()


def test_waiting_request_gets_the_slot_of_a_paused_one(make: Make) -> None:
    node = make(40, max_num_seqs=1)
    start(node, 0)
    node.submit(1, [1, 1], SamplingParams(max_tokens=20), Mode.LOCAL)
    node.obey(Pause(0))
    node.run()
    assert (1, 0) in node.finished
    assert (0, 0) not in node.finished
    node.obey(Resume(0))
    node.run()
    assert node.tokens == {(rid, 0): reference([rid, rid], 0, 20) for rid in (0, 1)}
    assert node.scheduler.totals.preemptions == 0


def test_resumed_request_waits_for_a_slot_with_its_blocks(make: Make) -> None:
    node = make(40, max_num_seqs=1)
    start(node, 0)
    node.obey(Pause(0))
    start(node, 1)
    held = node.scheduler.status().held
    node.obey(Resume(0))
    node.step()
    status = node.scheduler.status()
    assert (status.running, status.waiting) == (1, 1)
    assert status.held >= held
    node.run()
    assert node.tokens == {(rid, 0): reference([rid, rid], 0, 20) for rid in (0, 1)}


@pytest.mark.parametrize("num_blocks", [6, 7])
def test_paused_request_is_preempted_first(make: Make, num_blocks: int) -> None:
    """The blocks suffice for a request and a half: both a waiting and a running request take those of a paused one."""
    node = make(num_blocks)
    start(node, 0)
    node.obey(Pause(0))
    for rid in (1, 2):
        node.submit(rid, [rid] * BLOCK, SamplingParams(max_tokens=16), Mode.LOCAL, client=rid)
    node.step()
    assert node.scheduler.status().held
    node.run()
    assert {rid for rid, _ in node.finished} == {1, 2}
    status = node.scheduler.status()
    assert (status.held, status.paused) == (0, 1), "its blocks went to the others"
    node.obey(Resume(0))
    node.run()
    assert node.tokens[0, 0] == reference([0, 0], 0, 20)
    node.assert_all_free()


def test_cancelled_while_paused(make: Make) -> None:
    node = make(40)
    start(node, 0, n=3)
    node.obey(Pause(0))
    node.obey(Cancel(0))
    node.run()
    node.assert_all_free()
    node.obey(Resume(0))
    node.run()
    assert node.scheduler.status().paused == 0


def test_request_paused_during_its_handoff(make: Make) -> None:
    """A paused request does not begin a handoff. One that has begun goes on, and then no step includes it."""
    node = make(40)
    node.submit(0, [3] * 10, SamplingParams(max_tokens=4), Mode.HANDOFF)
    node.obey(Pause(0))
    assert not node.step().reserved
    node.obey(Resume(0))
    assert [reservation.rid for reservation in node.step().reserved] == [0]
    node.obey(Pause(0))
    node.obey(PrefillLocally(0))
    node.run()
    assert not node.tokens
    node.obey(Resume(0))
    node.run()
    assert node.tokens == {(0, 0): reference([3] * 10, 0, 4)}


def test_request_paused_while_its_grammar_is_compiled() -> None:
    """The request stays out of steps when its grammar is ready; once resumed, it follows the grammar."""
    outputs = []
    for pauses in (False, True):
        node = Node(64, 2, grammars=workers)
        node.submit(0, [1, 2, 3], LETTERS, Mode.LOCAL)
        if pauses:
            node.obey(Pause(0))
            while not node.scheduler.status().paused:
                node.step()
                time.sleep(0.001)
            node.run()
            assert not node.tokens
            node.obey(Resume(0))
        while not node.finished:
            if pauses and len(node.tokens[0, 0]) in (5, 10):
                node.obey(Pause(0))
                node.obey(Resume(0))
            node.step()
            time.sleep(0.001)
        outputs.append(node.tokens[0, 0])
        node.assert_all_free()
        node.close()
    assert outputs[0] == outputs[1]
