"""Costs that a node measures of its steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.step_cost_meter import LineFit, StepCostMeter
from node.reports import PromptShare
from pdserve.request_cost import LinearCost, StepCosts


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


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 10)), max_size=60))
def test_base_and_slope_are_never_negative(points: list[tuple[int, float]]) -> None:
    fit = LineFit(0.98)
    for x, y in points:
        fit.add(x, y)
    assert fit.line.slope >= 0.0
    assert fit.line.base >= -1e-9


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
    share, now, prompt_seconds = PromptShare(0.0), 0.0, 0.0
    for rate in (0.0, 0.5, 1.0, 0.25):
        for _ in range(100):
            now += 0.1
            prompt_seconds += 0.1 * rate
            found = share.update(prompt_seconds, now)
        assert found == pytest.approx(rate, abs=0.02)
        assert share.update(prompt_seconds, now) == found, "no time has passed"
    assert share.update(prompt_seconds + 1e6, now + 1e-3) == 1.0
