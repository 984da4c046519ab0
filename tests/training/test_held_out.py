"""The embedded model answers held-out questions with and without a handoff; held-out cases and how they are judged."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from fleet import start_fleet

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from training.checkpoint import CONFIG, random_weights, read_weights
from training.held_out import CALLS, QUESTIONS, SCHEMAS, Case, cases

EMBEDDING = "model.embed_tokens.weight"


def trained() -> bool:
    return not torch.equal(read_weights(EMBEDDED_MODEL)[EMBEDDING], random_weights(CONFIG)[EMBEDDING])


def answers(asked: Sequence[Case], prefill: int) -> list[dict[str, Any]]:
    """Return the message that answers each case, with ``prefill`` prefill nodes beside one decode node."""
    flags = ["--handoff-min-tokens", "0"] if prefill else []
    with start_fleet(EMBEDDED_MODEL, prefill, decode_flags=flags) as fleet, ThreadPoolExecutor(4) as threads:

        def answer(case: Case) -> dict[str, Any]:
            message: dict[str, Any] = fleet.post("/v1/chat/completions", case.body)["choices"][0]["message"]
            return message

        return list(threads.map(answer, asked))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_embedded_model_answers_held_out_questions_with_and_without_handoff() -> None:
    if not trained():
        pytest.skip("models/tiny has random weights; scripts/train-embedded-model trains them")
    asked = cases(EMBEDDED_MODEL)
    handed_off = answers(asked, prefill=1)
    alone = answers(asked, prefill=0)
    for given in (handed_off, alone):
        right = Counter(case.kind for case, message in zip(asked, given, strict=True) if case.right(message))
        assert right["question"] >= 45
        assert (right["tool"], right["schema"]) == (CALLS, SCHEMAS)
    assert [said(message) for message in handed_off] == [said(message) for message in alone]


def said(message: dict[str, Any]) -> Any:
    return message["content"], [call["function"] for call in message.get("tool_calls") or []]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_embedded_model_greets_copies_and_adds_below_20() -> None:
    sums = [(a, b) for a in range(20) for b in range(20 - a)]
    ways = ("{a} + {b}", "What is {a}+{b}?", "{a}+{b}?", "What is {a} + {b}?", "{a} plus {b}")
    wanted = {ways[(a + 3 * b) % len(ways)].format(a=a, b=b): f"{a} + {b} = {a + b}." for a, b in sums}
    for text in ("hello", "apple", "blue bird", "This is a test.", "the cat sat on the mat"):
        wanted |= {f"Repeat: {text}": text, f"Copy this: {text}": text, f"Repeat after me: {text}": text}
    wanted |= {"Say hello": "hello", "Repeat the word hello": "hello", "Say this is a test": "this is a test"}
    greeting = "Hello! I am the small model that comes with pdserve. Give me a text and ask me about it."
    wanted |= dict.fromkeys(("Hello", "hello", "Hi", "Hi there!", "Good morning"), greeting)
    first = json.loads((EMBEDDED_MODEL.parents[1] / "docs" / "first-request.json").read_text())["messages"][0]
    wanted[first["content"]] = "Clara hid the brass key in the cellar of the lighthouse."
    asked = [Case("", {"messages": [{"role": "user", "content": text}], "temperature": 0}, "") for text in wanted]
    answered = dict(zip(wanted, (said(message)[0] for message in answers(asked, prefill=0)), strict=True))
    assert answered == wanted


@pytest.mark.slow
def test_cases_are_always_the_same_and_reach_far_back() -> None:
    first = cases(EMBEDDED_MODEL)
    second = cases(EMBEDDED_MODEL)
    assert first == second
    assert Counter(case.kind for case in first) == {"question": QUESTIONS, "tool": CALLS, "schema": SCHEMAS}
    assert max(case.distance for case in first) > 1500
    assert all(case.distance <= 2000 for case in first)


@pytest.mark.parametrize(
    ("message", "is_right"),
    [
        ({"content": "Ada lives in Rome."}, True),
        ({"content": "In rome."}, True),
        ({"content": "Ada lives in Romer."}, False),
        ({"content": "Ada lives in Rome. Ben lives in Oslo. Eve lives in Bern."}, False),
        ({"content": None}, False),
    ],
)
def test_a_short_answer_with_the_value_counts(message: dict[str, Any], is_right: bool) -> None:
    assert Case("question", {}, ("Ada lives in Rome.", "Rome")).right(message) == is_right


@pytest.mark.parametrize(
    ("calls", "is_right"),
    [([("get_price", {"item": "cup"})], True), ([("get_price", {"item": "cups"})], False), ([], False)],
)
def test_a_call_counts_with_its_arguments(calls: list[tuple[str, dict[str, str]]], is_right: bool) -> None:
    made = [{"function": {"name": name, "arguments": json.dumps(values)}} for name, values in calls]
    assert Case("tool", {}, ("get_price", {"item": "cup"})).right({"tool_calls": made}) == is_right
    assert not Case("schema", {}, {"a": 1}).right({"content": '{"a": 1'})
    assert Case("schema", {}, {"a": 1}).right({"content": '{"a":  1}'})
