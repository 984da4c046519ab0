"""Text ends before the first complete stop string, independent of how it was split."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from router.text.stop_strings import StopMatcher

letters = st.text(alphabet="ab", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops)
    sent = []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        sent.append(text)
        if stopped:
            return sent, True
    return [*sent, matcher.flush()], False


def reference(stops: list[str], text: str) -> tuple[str, bool]:
    """The first prefix of the text that ends in a stop string, without its longest one."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))], True
    return text, False


@given(stop_lists, letters, st.lists(st.integers(0, 30), max_size=6))
def test_result_is_independent_of_the_split(stops: list[str], text: str, cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    parts = [text[a:b] for a, b in itertools.pairwise(edges)]
    sent, stopped = run(stops, parts)
    assert ("".join(sent), stopped) == reference(stops, text)


@given(stop_lists, letters)
def test_only_a_possible_stop_string_is_held_back(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    sent, stopped = matcher.push(text)
    if not stopped:
        held = text[len(sent) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_possible_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.push("Hello <") == ("Hello ", False)
    assert matcher.push("/e") == ("", False)
    assert matcher.push("x") == ("</ex", False)
    assert matcher.push("</end>never") == ("", True)
