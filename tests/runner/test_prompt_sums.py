"""Sums of hidden states over prompts that are computed in parts, preempted, and continued from cached blocks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.records import NewSequence
from pdserve.sampling_params import SamplingParams
from runner.pooling import PromptSums

LENGTH = 20


def sequence(seq: int, num_computed: int) -> NewSequence:
    return NewSequence(seq, b"", LENGTH, num_computed, (), SamplingParams(max_tokens=1))


@given(st.lists(st.tuples(st.integers(1, 7), st.booleans(), st.integers(0, 7)), max_size=40))
def test_sum_counts_each_token_once(parts: list[tuple[int, bool, int]]) -> None:
    """A part of some tokens; then perhaps a preemption that leaves some computed tokens in the cache."""
    states = torch.randn(LENGTH, 3, generator=torch.Generator().manual_seed(0))
    sums = PromptSums(4)
    done = 0
    sums.add(sequence(1, 0))
    for length, preempted, dropped in [*parts, (LENGTH, False, 0)]:
        prompt_sum = sums.count(1, states[done : done + length])
        done = min(done + length, LENGTH)
        assert prompt_sum is not None
        if preempted:
            done = max(0, done - dropped)
            sums.remove(1)
            sums.add(sequence(1, done))
    prompt_sum = sums.count(1, states[done:])
    assert prompt_sum is not None
    assert prompt_sum.num_tokens == LENGTH
    assert torch.allclose(prompt_sum.total, states.sum(0), atol=1e-5)


def test_lost_sum_is_no_sum() -> None:
    sums = PromptSums(2)
    for seq in (1, 2, 3):  # the third takes the place of the first
        sums.add(sequence(seq, 0))
        assert sums.count(seq, torch.ones(5, 3)) is not None
        sums.remove(seq)
    sums.add(sequence(1, 5))
    assert sums.count(1, torch.ones(5, 3)) is None, "its first five tokens are not known"
    sums.add(sequence(3, 5))
    prompt_sum = sums.count(3, torch.ones(5, 3))
    assert prompt_sum is not None
    assert prompt_sum.total.tolist() == [10.0] * 3
