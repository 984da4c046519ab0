"""The work on structure that clients give is bounded by a budget that counts all of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from fast_set import examples
from hostile_bodies import SCHEMAS, object_schema, tools
from hypothesis import given
from hypothesis import strategies as st
from loop_work import count_lines
from machine import patience
from test_generated_schemas import KEYWORDS, junk

from pdserve.errors import RequestError
from pdserve.grammar import MAX_BYTES
from router.text.chat.families import typed_values
from router.text.chat.families.typed_values import TypedValues
from router.text.chat.parsers import TOOL_PARSERS
from router.text.chat.strict_tools import Frame
from router.text.chat.tool_grammar import Marker
from router.text.chat.tools import tool_use
from router.text.structured import normalized_schemas
from router.text.structured.conversion import INLINE_WORK, Conversions
from router.text.structured.finite_patterns import matched_names
from router.text.structured.look_ahead import RewrittenPatterns, without_look_ahead
from router.text.structured.structured_outputs import json_schema_grammar
from router.text.structured.work_budget import Budget, WorkExceeded

LINES_PER_STEP = 20
START = 1000  # lines that any conversion may take
LIMIT = 20_000  # steps; that of requests is larger, and its tests slower


def calls(family: str) -> Callable[[dict[str, Any], Budget], object]:
    form = TOOL_PARSERS[family]
    return lambda schema, budget: form.grammar(tool_use(tools(schema), "auto", True), Marker, Frame(), budget)


PASSES: dict[str, Callable[[dict[str, Any], Budget], object]] = {
    "JSON": json_schema_grammar,
    "tags around values": calls("qwen3_coder"),
    "JSON of calls": calls("llama3_json"),
}


def check_work(convert: Callable[[Budget], object]) -> Budget:
    """Return what a conversion has spent, and check that its lines are in proportion."""
    normalized_schemas._patterns = RewrittenPatterns()  # no pattern is cached
    budget = Budget(LIMIT)

    def work() -> None:
        with suppress(RequestError):
            convert(budget)

    _, lines = count_lines(work, most=LINES_PER_STEP * LIMIT + START)
    assert lines <= LINES_PER_STEP * budget.spent + START
    return budget


@pytest.mark.parametrize("size", [1000, pytest.param(60_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("convert", PASSES)
@pytest.mark.parametrize("name", SCHEMAS)
def test_work_on_a_hostile_schema_is_spent_from_the_budget(name: str, convert: str, size: int) -> None:
    schema = object_schema(SCHEMAS[name](size))
    check_work(lambda budget: PASSES[convert](schema, budget))


@examples(60)
@given(schema=st.dictionaries(st.sampled_from(KEYWORDS), junk, max_size=6), convert=st.sampled_from(sorted(PASSES)))
def test_work_on_any_schema_is_spent_from_the_budget(schema: dict[str, Any], convert: str) -> None:
    check_work(lambda budget: PASSES[convert](object_schema(schema), budget))


@pytest.mark.parametrize("name", SCHEMAS)
def test_kinds_of_arguments_take_bounded_work(name: str) -> None:
    schema = object_schema(SCHEMAS[name](60_000))

    def kinds() -> None:
        values = TypedValues(schema)
        for argument in list(schema.get("properties", {}))[:20]:
            values.is_text(argument)

    count_lines(kinds, most=LINES_PER_STEP * typed_values._MAX_WORK + START)


pieces = st.sampled_from(
    ["(?!x)", "(?=.*a)", "(?:aa|bb)", "(a|b|c)*", "a{3,9}", "[^a-c]", ".*b", r"\d?", "(?:(?!b)a)?", "(a|"]
)


@examples(100)
@given(parts=st.lists(pieces, max_size=12), count=st.integers(1, 8))
def test_work_on_look_ahead_is_spent_from_the_budget(parts: list[str], count: int) -> None:
    check_work(lambda budget: without_look_ahead("^" + "".join(parts) * count + "$", budget))


def test_look_ahead_before_many_alternatives_ends() -> None:
    """Each alternative doubles the paths to the end of the pattern."""
    pattern = "^(?!x)" + "(?:aa|bb)" * 60 + "$"
    assert len(pattern) < 573
    budget = Budget()
    assert without_look_ahead(pattern, budget) is None
    assert budget.spent < 20_000
    assert without_look_ahead("^(?!x)" + "(?:aa|bb)" * 6 + "$", budget) is not None


@examples(60)
@given(
    names=st.sets(st.text("ab", max_size=6), max_size=12),
    parts=st.lists(st.sampled_from(["a", "b?", "[ab]", "(a|b)", "a{0,3}", "(?:a?){2}", "b{0}"]), max_size=8),
)
def test_work_on_patterns_of_names_is_spent_from_the_budget(names: set[str], parts: list[str]) -> None:
    check_work(lambda budget: matched_names("^" + "".join(parts) + "$", names, budget))


def test_a_value_that_is_shared_costs_as_often_as_it_is_written() -> None:
    shared = {"enum": ["x" * 1600]}
    budget = Budget()
    budget.encoded([shared] * 10)
    assert budget.spent > 10 * 100
    with pytest.raises(RequestError, match=f"more than {MAX_BYTES} bytes; simplify"):
        Budget().encoded([shared] * 100)


def test_a_part_ends_before_its_whole() -> None:
    budget = Budget(100)
    budget.part(10).attempt(lambda part: part.spend(10))
    assert budget.spent == 10
    assert budget.part(10).attempt(_spend_all) is None
    with pytest.raises(WorkExceeded, match="more than 100 steps") as raised:
        budget.part(1000).attempt(_spend_all)
    assert raised.value.budget is budget


def _spend_all(budget: Budget) -> None:
    while True:
        budget.spend()


def test_a_long_conversion_delays_no_other_request() -> None:
    """The conversion's thread holds no lock that the event loop needs."""
    begun = threading.Event()
    ended = threading.Event()

    def long(budget: Budget) -> str:
        budget.spend(INLINE_WORK + 1)
        begun.set()
        assert ended.wait(patience(30))
        return "long"

    async def run() -> None:
        conversions = Conversions()
        task = asyncio.create_task(conversions.begin().run(long))
        await asyncio.to_thread(begun.wait, patience(30))
        schema = SCHEMAS["deep"](500)
        assert await conversions.begin().run(lambda budget: json_schema_grammar(schema, budget))
        assert not task.done()
        ended.set()
        assert await task == "long"
        conversions.close()

    asyncio.run(run())


def test_all_conversions_of_a_request_share_a_budget() -> None:
    async def run() -> None:
        conversions = Conversions()
        conversion = conversions.begin()
        half = Budget().limit // 2
        for _ in range(2):
            await conversion.run(lambda budget: budget.spend(half))
        with pytest.raises(WorkExceeded, match="steps to convert; simplify or shorten"):
            await conversion.run(lambda budget: budget.spend(half))
        await conversions.begin().run(lambda budget: budget.spend(half))
        conversions.close()

    asyncio.run(run())
