"""Text ends before the first complete stop string, independent of how it was split."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.text.chat.families.harmony_parser import HarmonyParser
from router.text.chat.reasoning_parser import ReasoningParser, Thinking
from router.text.chat.tool_parsers import HermesToolParser
from router.text.stop_strings import LateStopMatcher, Reasoned, StopMatcher, StopStrings

ALPHABET = "ab\N{GRINNING FACE}"
letters = st.text(ALPHABET, max_size=30)
stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=4) | st.text("ab", min_size=1, max_size=12), max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str]:
    """Return the texts that are sent, and the stop string that was found."""
    matcher = StopMatcher(StopStrings(stops))
    sent = []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        sent.append(text)
        if stopped:
            return sent, matcher.found
    return [*sent, matcher.flush()], matcher.found


def reference(stops: list[str], text: str) -> tuple[str, str]:
    """The first prefix of the text that ends in a stop string, without its longest one; that stop string."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, ""


@given(stop_lists, letters, st.lists(st.integers(0, 30), max_size=6))
@example(["b", "aa", "bb"], "a", [])  # a stop string that continues an earlier one, with another between them
def test_result_is_independent_of_the_split(stops: list[str], text: str, cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    parts = [text[a:b] for a, b in itertools.pairwise(edges)]
    sent, stop = run(stops, parts)
    assert ("".join(sent), stop) == reference(stops, text)


@given(stop_lists, letters, letters)
def test_stop_strings_that_are_complete_too_early_do_not_count(stops: list[str], early: str, late: str) -> None:
    """A stop string that is complete later counts, even if it began before. All text before its beginning is sent."""
    matcher = StopMatcher(StopStrings(stops))
    sent, stopped = matcher.push(early, may_stop=False)
    assert not stopped
    text, stopped = matcher.push(late)
    sent += text if stopped else text + matcher.flush()
    whole = early + late
    ends = (end for end in range(len(early) + 1, len(whole) + 1) if any(whole[:end].endswith(stop) for stop in stops))
    end = next(ends, None)
    assert stopped == (end is not None)
    length = max((len(stop) for stop in stops if whole[:end].endswith(stop)), default=0)
    assert sent == (whole if end is None else whole[: end - length])


@given(stop_lists, letters)
def test_longest_possible_beginning_of_a_stop_string_is_held_back(stops: list[str], text: str) -> None:
    matcher = StopMatcher(StopStrings(stops))
    sent, stopped = matcher.push(text)
    if not stopped:
        beginnings = [length for stop in stops for length in range(len(stop)) if text.endswith(stop[:length])]
        assert sent == text[: len(text) - max(beginnings, default=0)]


def test_possible_stop_string_is_held_back() -> None:
    matcher = StopMatcher(StopStrings(["</end>"]))
    assert matcher.push("Hello <") == ("Hello ", False)
    assert matcher.push("/e") == ("", False)
    assert matcher.push("x") == ("</ex", False)
    assert matcher.push("</end>never") == ("", True)


@pytest.mark.parametrize("text", ["a" * 100_000, "ab" * 50_000, ("a" * 4094 + "c") * 25])
def test_text_is_matched_in_linear_time(text: str) -> None:
    """A second suffices many times over; comparing all prefixes of the stop strings after each token takes an hour."""
    stops = StopStrings([*("b" + "a" * 4000 + chr(0x4E00 + i) * 90 for i in range(15)), "a" * 4095 + "b"])
    matcher = StopMatcher(stops)
    started = time.process_time()
    sent = "".join(matcher.push(letter)[0] for letter in text)
    assert time.process_time() - started < 20
    assert sent + matcher.flush() == text


@pytest.mark.parametrize("text", ["a" * 100_000, "axbx" * 25_000])
def test_time_hardly_depends_on_the_number_of_stop_strings(text: str) -> None:
    """The text begins each of them all the time, and completes none. One by one, sixteen take twelve times as long."""

    def seconds(stops: list[str]) -> float:
        strings = StopStrings(stops)
        started = time.process_time()
        assert StopMatcher(strings).push(text)[1] is False
        return time.process_time() - started

    stops = ["a" * 4080 + chr(0x4E00 + n) * 16 for n in range(16)]
    assert min(seconds(stops) for _ in range(3)) < 5 * min(seconds(stops[:1]) for _ in range(3))


def test_stop_strings_with_the_same_beginning() -> None:
    assert run(["abcd", "abce", "abx", "bcd"], list("abcabce")) == (["", "", "", "abc", "", "", ""], "abce")
    assert run(["abc", "ab"], ["xabc"]) == (["x"], "ab")
    assert run(["ab", "abc", "b"], ["xab"]) == (["x"], "ab")


THINK = Thinking("<think>", "</think>")
OPENED = Thinking("<think>", "</think>", opened=True)
READERS: dict[str, Callable[[], Reasoned]] = {
    "begins": lambda: ReasoningParser(THINK),
    "opened": lambda: ReasoningParser(OPENED),
    "calls": lambda: HermesToolParser(["f"], True, THINK),
    "channels": lambda: HarmonyParser(["f"]),
}
CALL = '<tool_call>{"name": "f"}</tool_call>'
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("reader", "text", "sent"),
    [
        ("begins", "<think>a STOP b</think>\n\nyes STOP no", "<think>a STOP b</think>\n\nyes "),
        ("begins", "yes STOP no", "yes "),
        ("begins", "<thiSTOP no", "<thi"),
        ("begins", "<think>a STOP", "<think>a STOP"),
        ("begins", "<think>a STOP</thin", "<think>a STOP</thin"),
        ("opened", "a STOP b</think>STOP no", "a STOP b</think>"),
        ("opened", "a ST</think>OP STOP", "a ST</think>OP "),
        ("calls", f"<think>STOP {CALL}", f"<think>STOP {CALL}"),
        ("calls", f"<think>STOP <tool_call> STOP {CALL}yes STOP", f"<think>STOP <tool_call> STOP {CALL}yes "),
        ("channels", f"{ANALYSIS}STOP<|end|>{FINAL}yes STOP no", f"{ANALYSIS}STOP<|end|>{FINAL}yes "),
        ("channels", f"{ANALYSIS}STOP<|end|><|start|>assistant{ANALYSIS}STOP<|end|>", None),
    ],
)
def test_stop_strings_match_behind_the_reasoning(reader: str, text: str, sent: str | None) -> None:
    for pieces in ([text], list(text), [text[:9], text[9:20], text[20:]]):
        matcher = LateStopMatcher(StopStrings(["STOP"]), READERS[reader]())
        passed = ""
        stopped = False
        for piece in pieces:
            new, stopped = matcher.push(piece)
            passed += new
            if stopped:
                break
        assert passed + ("" if stopped else matcher.flush()) == (text if sent is None else sent)
        assert stopped == (sent not in (None, text))


def test_reasoning_passes_at_once() -> None:
    matcher = LateStopMatcher(StopStrings(["STOP"]), READERS["opened"]())
    assert matcher.push("a STO") == ("a STO", False)
    assert matcher.push("P b</think>") == ("P b</think>", False)
    assert matcher.push("c ST") == ("c ", False)
