"""Token rules: what their masks allow, and that every way of computing a choice applies them alike."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
from fast_set import examples
from hypothesis import given
from hypothesis import strategies as st
from toy_node import Node

from engine.token_rules import ChoiceRules, TokenRules
from pdserve.ipc.messages import Mode
from pdserve.sampling_params import SamplingParams

VOCAB = 40  # not a multiple of 32
ids = st.integers(0, 3)  # few, so that words and markers occur
words = st.lists(ids, min_size=1, max_size=3).map(tuple)


def allowed(mask: bytes) -> set[int]:
    return {token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1}


def plain_end_of_thinking(sampling: SamplingParams, output: list[int]) -> int | None:
    """Return the token that has to follow ``output``."""
    start = list(sampling.thinking_start_ids)
    end = list(sampling.thinking_end_ids)
    begun = 0
    if start:
        starts = [at + len(start) for at in range(len(output)) if output[at : at + len(start)] == start]
        if not starts:
            return None
        begun = starts[0]
    thought = output[begun:]
    ends = [end, *map(list, sampling.thinking_call_ids)]
    if any(thought[at : at + len(end_ids)] == end_ids for end_ids in ends for at in range(len(thought))):
        return None
    beyond = len(thought) - sampling.thinking_token_budget
    return end[beyond] if beyond >= 0 else None


@examples(300)
@given(
    st.sets(st.integers(0, VOCAB - 1), min_size=5),
    st.lists(words, max_size=4),
    st.integers(0, 4),
    st.sampled_from([(), (1,), (1, 2)]),
    st.sampled_from([(), (3,), (3, 3), (2, 3)]),
    st.sampled_from([(), ((0, 2),), ((4,), (1, 1, 0))]),
    st.lists(ids, max_size=12),
    st.integers(0, 12),
)
def test_masks_equal_those_of_a_plain_search(
    some: set[int],
    bad_words: list[tuple[int, ...]],
    budget: int,
    start: tuple[int, ...],
    end: tuple[int, ...],
    calls: tuple[tuple[int, ...], ...],
    draws: list[int],
    resumed: int,
) -> None:
    sampling = SamplingParams(
        max_tokens=99,
        allowed_token_ids=tuple(some | {0, 1, 2, 3, 4}),
        bad_words=tuple(bad_words),
        thinking_token_budget=budget,
        thinking_start_ids=start,
        thinking_end_ids=end,
        thinking_call_ids=calls,
    )
    rules = TokenRules(sampling, VOCAB)
    prompt = [3, 1, 2]  # the prompt does not count
    choice = ChoiceRules(rules)
    output = list[int]()
    for number, draw in enumerate(draws):
        if number == resumed:  # another node continues
            choice = ChoiceRules(rules)
        mask = allowed(choice.masks(array("I", prompt + output), len(prompt), frozenset())[0])
        forced = plain_end_of_thinking(sampling, output) if end else None
        if forced is not None:
            assert mask == {forced}
        else:
            bad = {word[-1] for word in bad_words if output[len(output) + 1 - len(word) :] == list(word[:-1])}
            assert mask == set(sampling.allowed_token_ids) - bad
        output.append(draw if draw in mask else min(mask))


def test_forbidden_end_is_allowed_where_no_other_token_is() -> None:
    rules = ChoiceRules(TokenRules(SamplingParams(max_tokens=9, allowed_token_ids=(7, 9)), VOCAB))
    tokens = array("I", [1])
    assert allowed(rules.masks(tokens, 1, {7})[0]) == {9}
    assert allowed(rules.masks(tokens, 1, {7, 9})[0]) == {7, 9}


def test_end_of_reasoning_waits_for_the_rest_of_a_character() -> None:
    sampling = SamplingParams(max_tokens=9, bad_words=((8,),), thinking_token_budget=1, thinking_end_ids=(6, 6, 7))
    rules = ChoiceRules(TokenRules(sampling, VOCAB))
    tokens = array("I", [1])
    masks = []
    for token in (9, 9, 9, 9, 6, 6, 7):
        tokens.append(token)
        masks.append([allowed(mask) for mask in rules.masks(tokens, 1, frozenset())])
    rest = set(range(VOCAB)) - {8}
    assert masks == [*3 * [[{6}, rest]], [{6}], [{6}], [{7}], [rest]]


def test_rules_that_do_not_depend_on_the_output_keep_steps_in_flight() -> None:
    fixed = SamplingParams(20, min_tokens=2, allowed_token_ids=(6, 7, 8), bad_words=((8,),))
    varying = SamplingParams(20, allowed_token_ids=(6, 7), bad_words=((6, 6, 6),))
    overlapped = []
    for sampling in (fixed, varying):
        node = Node(64, 2)
        node.submit(0, [1, 2, 3], sampling, Mode.LOCAL)
        node.run()
        assert len(node.tokens[0, 0]) == 20
        assert set(node.tokens[0, 0]) <= {6, 7}
        overlapped.append(node.runner.num_overlapped)
        node.close()
    assert overlapped[0] > 10
    assert overlapped[1] == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_choices_follow_token_rules_and_resume_with_the_same_tokens(depth: int) -> None:
    """The toy model samples from its mask alone, so the tokens show every mask."""
    sampling = SamplingParams(
        20,
        n=2,
        min_tokens=3,
        stop_token_ids=(5,),
        allowed_token_ids=(5, 6, 7, 8),
        bad_words=((6, 7), (8,)),
        thinking_token_budget=4,
        thinking_end_ids=(9, 10),
    )
    node = Node(64, depth)
    node.submit(0, [1, 2, 3], sampling, Mode.LOCAL)
    node.submit(1, [1, 2, 3], SamplingParams(30), Mode.LOCAL)  # runs beside it
    node.run()
    for choice in (0, 1):
        tokens = node.tokens[0, choice]
        assert tokens[4:6] == [9, 10] or 5 in tokens[2:4]
        assert set(tokens) <= {5, 6, 7, 9, 10}
        assert 5 not in tokens[:2]
        assert (6, 7) not in set(pairwise(tokens))
        node.submit(2 + choice, [1, 2, 3], sampling, Mode.LOCAL, resume={choice: tokens[:2]})
        node.run()
        assert node.tokens[2 + choice, choice] == tokens[2:]
    node.assert_all_free()
    node.close()
