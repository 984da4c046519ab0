"""Pipeline stages: decoding sequences are split among steps, so that every stage has a step to compute."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from fast_set import examples
from hypothesis import given
from hypothesis import strategies as st
from toy import num_tokens, reference
from toy_node import Node

from engine.scheduler.step_builder import StepBuilder
from pdserve.ipc.messages import Mode
from pdserve.sampling_params import SamplingParams

STAGED = [(2, 2), (3, 2), (3, 3), (4, 3)]  # steps in flight, stages


@pytest.mark.parametrize(("depth", "stages"), STAGED)
@given(
    requests=st.lists(st.tuples(st.integers(1, 20), st.integers(20, 40)), min_size=3, max_size=8),
)
@examples(25)
def test_stages_idle_only_after_a_sequence_begins_or_ends(
    depth: int, stages: int, requests: list[tuple[int, int]]
) -> None:
    """After a begin or an end, the microbatches of the others may be uneven for one round."""
    node = Node(128, depth, stages)
    for rid, (length, max_tokens) in enumerate(requests):
        node.submit(rid, [rid] * length, SamplingParams(max_tokens=max_tokens), Mode.LOCAL)
    idle = 0
    while len(requests) - len(node.finished) >= stages:
        launched = len(node.runner.launched)
        node.step()
        idle += not any(plan.scheduled for plan in node.runner.launched[launched:])
    assert idle <= stages * (1 + len(requests))
    node.run()
    for rid, (length, max_tokens) in enumerate(requests):
        assert node.tokens[rid, 0] == reference([rid] * length, 0, max_tokens)
    node.assert_all_free()
    node.close()


@pytest.mark.parametrize(("depth", "stages"), STAGED)
@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_microbatches_cover_all_sequences_evenly(depth: int, stages: int, count: int) -> None:
    """As many steps as stages hold every sequence once, in microbatches of about the same size; none is empty."""
    node = Node(64, depth, stages, full_step=16)
    for rid in range(count):
        node.submit(rid, [rid] * 2, SamplingParams(max_tokens=12), Mode.LOCAL)
    node.run()
    prompts, *decodes = [plan for plan in node.runner.launched if plan.scheduled][: 9 * stages + 1]
    assert len(prompts.scheduled) == count
    assert decodes[-1].step - decodes[0].step == len(decodes) - 1, "no plan in between had nothing to compute"
    for at in range(0, len(decodes), stages):
        together = [[item.seq for item in plan.scheduled] for plan in decodes[at : at + stages]]
        assert sorted(seq for step in together for seq in step) == list(range(1, count + 1))
        assert max(map(len, together)) == -(-count // stages)
    node.close()


@pytest.mark.parametrize(("depth", "stages"), STAGED)
def test_chunks_of_a_prompt_are_launched_back_to_back(depth: int, stages: int) -> None:
    node = Node(64, depth, stages)
    node.submit(0, list(range(100)), SamplingParams(max_tokens=3), Mode.LOCAL)
    in_flight = []
    while not node.tokens:
        node.step()
        in_flight.append(len(node.runner.launched))
    # Seven parts; a result is taken only when no more steps may be in flight.
    assert in_flight[:7] == [1, 2, 3, 4, 5, 6, 7]
    assert [num_tokens(plan) for plan in node.runner.launched[:7]] == [16] * 6 + [4]
    assert node.runner.num_overlapped >= 7 - depth
    node.run()
    assert node.tokens[0, 0] == reference(list(range(100)), 0, 3)
    node.close()


def test_sequences_of_a_planned_step_are_immutable() -> None:
    builder = StepBuilder(1, max_tokens=16, full_step=16)
    sequences = builder.sequences()
    assert (sequences.decodes, sequences.prompts) == ((), ())
    with pytest.raises(FrozenInstanceError):
        sequences.decodes = ()  # type: ignore[misc]
