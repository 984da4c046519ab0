"""Prompt lookup against a naive search."""

from __future__ import annotations

import random
from array import array

from fast_set import examples
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.prompt_lookup import SUFFIXES, PromptLookup


def naive(text: list[int], length: int) -> int:
    """Return where the last ``length`` tokens ended before, the last time; 0 if they never did."""
    suffix = text[len(text) - length :]
    return next((end for end in range(len(text) - 1, length - 1, -1) if text[end - length : end] == suffix), 0)


def continued(text: list[int], start: int, most: int) -> tuple[int, ...]:
    """Return the tokens from ``start`` on, which repeat behind the end of the text."""
    longer = list(text)
    for at in range(most):
        longer.append(longer[start + at])
    return tuple(longer[len(text) :])


@given(
    first=st.lists(st.integers(0, 3), max_size=40),
    more=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=80), max_size=20),
    most=st.integers(1, 5),
)
@examples(200)
def test_drafts_follow_the_last_occurrence_of_a_suffix(first: list[int], more: list[list[int]], most: int) -> None:
    """There are none if it never occurred. An occurrence may be missed, as suffixes share places in a table."""
    lookup = PromptLookup()
    text = list(first)
    for tokens in [[], *more]:
        text += tokens
        if not text:
            continue
        starts = [start for length in SUFFIXES if len(text) >= length and (start := naive(text, length))]
        assert lookup.propose(array("I", text), most) in {(), *(continued(text, start, most) for start in starts)}


def test_a_longer_suffix_decides() -> None:
    text = [1, 2, 3, 4, 5, 6, 70, 71, 4, 5, 6, 80, 81, 1, 2, 3, 4, 5, 6]
    lookup = PromptLookup()
    assert lookup.propose(array("I", text), 2) == (70, 71)
    assert lookup.propose(array("I", [*text, 9, 4, 5, 6]), 3) == (9, 4, 5)


def test_most_suffixes_of_a_long_text_are_found() -> None:
    """Suffixes that share a place hide some; what is found follows an earlier occurrence."""
    rng = random.Random(1)
    text = rng.choices(range(150_000), k=20_000)
    lookup = PromptLookup()
    num_right = 0
    for _ in range(200):
        start = rng.randrange(19_000)
        text += [rng.randrange(150_000), *text[start : start + 8]]
        num_right += lookup.propose(array("I", text), 3) == tuple(text[start + 8 : start + 11])
    assert num_right > 150
