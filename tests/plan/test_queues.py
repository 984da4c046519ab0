"""Waiting times and occupancy of the queueing models."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.plan.queues import occupancy, percentile, waits, weighted_percentile
from cli.plan.workload import workload_of

times = st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 3.0)), min_size=1, max_size=40)


@given(times, st.integers(1, 5), st.floats(1.0, 4.0))
def test_waits_never_grow_with_more_nodes_or_a_lower_rate(
    requests: list[tuple[float, float]], nodes: int, faster: float
) -> None:
    gaps, seconds = zip(*requests, strict=True)
    before = waits(gaps, seconds, faster, nodes)
    for after in (waits(gaps, seconds, faster, nodes + 1), waits(gaps, seconds, 1.0, nodes)):
        assert all(later <= sooner + 1e-9 for later, sooner in zip(after, before, strict=True))


@given(times, st.floats(0.1, 10.0))
def test_waits_scale_with_the_time_unit(requests: list[tuple[float, float]], unit: float) -> None:
    gaps, seconds = zip(*requests, strict=True)
    ours = waits(gaps, seconds, 2.0, 2)
    theirs = waits(gaps, [unit * each for each in seconds], 2.0 / unit, 2)
    assert theirs == pytest.approx([unit * each for each in ours], abs=1e-6)


def test_equal_prompts_give_the_m_d_1_queue() -> None:
    """In M/D/1 the mean wait is ρ/(2(1-ρ)) services (Pollaczek, Khinchine)."""
    workload = workload_of("100", "1", 0.0, samples=100_000)
    found = waits(workload.gaps, [1.0] * len(workload.gaps), 0.5, 1)
    assert sum(found) / len(found) == pytest.approx(0.5, rel=0.05)


def test_independent_sequences_are_poisson_distributed() -> None:
    shares = occupancy(30.0, lambda batch: 0.1, 64)
    assert shares[:10] == pytest.approx([math.exp(-3.0) * 3.0**n / math.factorial(n) for n in range(10)], rel=1e-6)


def test_serial_steps_give_the_m_m_1_queue() -> None:
    """A step time proportional to the sequences gives M/M/1: n sequences for a share (1-ρ)ρⁿ of the time."""
    shares = occupancy(0.5, lambda batch: float(batch), 200)
    assert shares[:8] == pytest.approx([0.5 * 0.5**n for n in range(8)])
    assert sum(shares) == pytest.approx(1.0)


@given(st.floats(0.0, 90.0), st.floats(0.0, 9.0), st.integers(10, 60))
def test_mean_batch_never_shrinks_with_demand(demand: float, more: float, most: int) -> None:
    def beyond(tokens: float) -> list[float]:
        shares = occupancy(tokens, lambda batch: 0.01 + 0.0001 * batch, most)
        return [sum(shares[n:]) for n in range(most + 1)]

    assert all(a <= b + 1e-9 for a, b in zip(beyond(demand), beyond(demand + more), strict=True))


def test_percentiles_are_observed_values() -> None:
    assert [percentile([3.0, 1.0, 2.0, 4.0], percent) for percent in (1, 50, 51, 100)] == [1.0, 2.0, 3.0, 4.0]
    assert weighted_percentile([(5.0, 1.0), (1.0, 99.0)], 99) == 1.0
    assert weighted_percentile([(5.0, 1.1), (1.0, 98.9)], 99) == 5.0
