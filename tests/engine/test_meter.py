"""Costs that a node measures of its steps."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.step_cost_meter import LineFit, StepCostMeter, StepWork
from node.reports import PromptShare
from pdserve.request_cost import MOST_SECONDS, LinearCost, StepCosts


@given(
    st.floats(1e-4, 1.0),
    st.floats(1e-7, 1e-2),
    st.lists(st.integers(1, 10_000), min_size=2, max_size=40, unique=True),
)
def test_points_on_a_line_give_the_line(base: float, slope: float, counts: list[int]) -> None:
    fit = LineFit(0.98)
    for count in [*counts, 1, 10_000]:
        fit.add(count, base + slope * count)
    assert fit.line.base == pytest.approx(base, rel=1e-3, abs=1e-6)
    assert fit.line.slope == pytest.approx(slope, rel=1e-3, abs=1e-9)


SECONDS = st.sampled_from([0.0, 1e-9, 0.005, 0.036, 1e9, math.inf, -math.inf, math.nan]) | st.floats()
COUNTS = st.sampled_from([0, 1, 3, 2048]) | st.integers(0, 1 << 31)


def in_range(line: LinearCost) -> bool:
    return 0.0 <= line.base <= MOST_SECONDS and 0.0 <= line.slope <= MOST_SECONDS


@given(st.booleans(), st.lists(st.tuples(COUNTS, SECONDS), max_size=60), SECONDS.filter(lambda most: most >= 0.0))
def test_base_and_slope_of_any_points_are_in_range(flat: bool, points: list[tuple[int, float]], most: float) -> None:
    fit = LineFit(0.98, flat)
    for x, y in points:
        fit.add(x, y)
        assert in_range(fit.line)
        assert in_range(fit.with_base_up_to(most))


class Measured(NamedTuple):
    """A step and its seconds; idle steps have no tokens."""

    decodes: int
    prompt_tokens: int
    seconds: float
    context: float
    drafts: int
    images: int
    ahead: bool


CONTEXTS = st.floats(0.0, 1e9)
DRAFTS = st.sampled_from([0, 0, 0, 1, 40])
IMAGES = st.sampled_from([0, 0, 0, 1, 10**6])
STEPS = st.builds(Measured, COUNTS, st.just(0) | COUNTS, SECONDS, CONTEXTS, DRAFTS, IMAGES, st.booleans())
TYPICAL_STEPS = st.builds(
    Measured,
    st.integers(0, 4),
    st.sampled_from([0, 0, 0, 500, 2048]),
    st.floats(0.0, 0.1),
    st.floats(0.0, 1e5),
    st.just(0),
    IMAGES,
    st.just(False),
)


@given(st.lists(STEPS | TYPICAL_STEPS, max_size=40), st.builds(StepWork, COUNTS, COUNTS, CONTEXTS, DRAFTS, IMAGES))
def test_costs_of_any_steps_are_in_range(steps: list[Measured], next_step: StepWork) -> None:
    meter = StepCostMeter()
    for step in steps:
        work = step._asdict()
        seconds = meter.add_step(**work)
        assert 0.0 <= seconds <= MOST_SECONDS
        assert all(map(in_range, (meter.decode, meter.prompt, meter.drafts, meter.costs(LinearCost()).decode)))
        assert meter.expected(next_step) >= 0.0
        if (chunk := meter.chunk) is not None:
            assert min(chunk.token.base, chunk.token.slope, chunk.hidden) >= 0.0
            assert math.isfinite(chunk.at(2048, 1e5))


@pytest.mark.parametrize("growth", [1.2 + step / 1000 for step in range(20)])
def test_decodes_that_cost_more_than_in_proportion_leave_a_base_of_zero(growth: float) -> None:
    """A short stream, then three with long contexts, on a node that has computed no prompt."""
    meter = StepCostMeter()
    for _ in range(39):
        meter.add_step(1, 0, 0.0058444)
    for _ in range(60):
        meter.add_step(3, 0, 3 * growth * 0.0058444)
        costs = meter.costs(LinearCost())
        assert costs.prompt == LinearCost()
        assert costs.decode.base >= 0.0


def test_line_through_points_of_one_x_goes_through_the_origin() -> None:
    fit = LineFit(0.98)
    for _ in range(10):
        fit.add(500, 0.1)
    assert fit.line.base == 0.0
    assert fit.line.slope == pytest.approx(0.1 / 500)


def test_fit_follows_a_change() -> None:
    fit = LineFit(0.98)
    for seconds in (0.5, 0.1):
        for count in range(100, 700):
            fit.add(count, seconds)
    assert fit.line.at(400) == pytest.approx(0.1, rel=0.02)


def test_prompts_decodes_and_reads_are_told_apart() -> None:
    meter = StepCostMeter()
    assert meter.costs(LinearCost()) == StepCosts()
    for count in range(1, 40):
        meter.add_step(count, 0, 0.005 + 0.001 * count)
    for count in range(100, 4000, 100):
        meter.add_step(3, count, 0.004 + 3 * 0.001 + count * 1e-4)
    costs = meter.costs(LinearCost(0.002, 1e-5))
    assert (costs.decode.base, costs.decode.slope) == pytest.approx((0.005, 0.001))
    assert (costs.prompt.base, costs.prompt.slope) == pytest.approx((0.004, 1e-4))
    assert (costs.read.base, costs.read.slope) == (0.002, 1e-5)


def test_steps_of_equal_length_do_not_make_prompts_free() -> None:
    """Steps that keep an ITL target have fewer tokens where these attend to more, and take as long."""
    meter = StepCostMeter()
    for count in range(1, 40):
        meter.add_step(count, 0, 0.005 + 0.001 * count)
    for index in range(100):
        meter.add_step(5, 300 + index * 370 % 1000, 0.036)
    prompt = meter.costs(LinearCost()).prompt
    assert prompt.base <= 0.0051
    assert prompt.at(800) == pytest.approx(0.036 - 5 * 0.001, rel=0.1)


def test_slope_of_decodes_is_reported_once_steps_differ() -> None:
    meter = StepCostMeter()
    for index in range(100):
        meter.add_step(1 + index % 2, 0, 0.005 + 0.003 * (index % 3))  # noise looks like a slope
    decode = meter.costs(LinearCost()).decode
    assert decode.slope == 0.0
    assert 0.005 < decode.base < 0.011
    for count in range(1, 20):
        meter.add_step(count, 0, 0.005 + 0.001 * count)
    assert meter.costs(LinearCost()).decode.slope > 0.0


def test_prompts_cost_what_they_add_to_a_decode_step() -> None:
    meter = StepCostMeter()
    for count in range(1, 40):
        assert meter.add_step(count, 0, 0.005 + 0.001 * count) == 0.0
    assert meter.add_step(10, 100, 0.025) == pytest.approx(0.010)
    assert meter.add_step(0, 100, 0.025) == 0.025


def test_prompt_share_follows_the_last_seconds() -> None:
    share = PromptShare(0.0)
    now = 0.0
    prompt_seconds = 0.0
    for rate in (0.0, 0.5, 1.0, 0.25):
        for _ in range(100):
            now += 0.1
            prompt_seconds += 0.1 * rate
            reported = share.update(prompt_seconds, now)
        assert reported == pytest.approx(rate, abs=0.02)
        assert share.update(prompt_seconds, now) == reported, "no time has passed"
    assert share.update(prompt_seconds + 1e6, now + 1e-3) == 1.0


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 100.0)), max_size=20))
def test_prompt_share_of_any_sums_is_a_share(spent: list[tuple[float, float]]) -> None:
    share = PromptShare(0.0)
    now = 0.0
    prompt_seconds = 0.0
    for seconds, passed in spent:
        now += passed
        prompt_seconds += seconds
        assert 0.0 <= share.update(prompt_seconds, now) <= 1.0


def test_a_first_small_chunk_says_nothing_about_long_contexts() -> None:
    """A small chunk takes longer than its tokens: that is no reason to expect seconds for those that attend to more."""
    meter = StepCostMeter()
    for context in (1000.0, 4000.0, 16_000.0):
        meter.add_step(0, 8192, 0.2 + context * 20e-6, context)
    for _ in range(20):
        meter.add_step(8, 0, 0.005)
    meter.add_step(8, 32, 0.0116, 16.0)
    assert meter.chunk is not None
    assert meter.chunk.at(8192, 4096.0) < 1.0


@given(unit=st.floats(1e-6, 1e-3), works=st.lists(st.integers(1, 20_000), min_size=1, max_size=8))
def test_work_of_images_is_measured_apart(unit: float, works: list[int]) -> None:
    """Steps with images change no cost of text."""
    meter = StepCostMeter()
    for count in (4, 8):
        meter.add_step(count, 0, 0.005)
        meter.add_step(count, 1000, 0.030, 500.0)
    text = meter.chunk
    assert text is not None
    assert meter.image_unit == text.token.base
    for work in works:
        assert meter.add_step(8, 100, 0.005 + text.at(100, 50.0) + work * unit, 50.0, images=work) > 0.0
    assert meter.image_unit == pytest.approx(unit)
    assert meter.chunk == text
    plain = meter.expected(StepWork(8, 100, 50.0))
    assert meter.expected(StepWork(8, 100, 50.0, images=1000)) == pytest.approx(plain + 1000 * unit)


def test_a_step_that_only_encodes_takes_the_time_of_its_images() -> None:
    meter = StepCostMeter()
    assert meter.expected(StepWork(images=10)) == math.inf
    meter.add_step(0, 1000, 0.03, 500.0)
    meter.add_step(0, 0, 0.2, images=1000)
    assert meter.expected(StepWork(images=500)) == pytest.approx(0.1)
