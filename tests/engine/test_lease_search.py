"""Every order of events that one handoff and a few faults can meet. See docs/leases.md."""

from __future__ import annotations

import pytest
from lease_search import State, search

CLOCKS = pytest.mark.parametrize("d_runs", [True, False], ids=["clocks run", "the clock of D stands"])


@CLOCKS
def test_no_order_of_events_and_one_fault_breaks_a_promise(d_runs: bool) -> None:
    assert search(State(faults=1, d_runs=d_runs)) > 1000


@pytest.mark.slow
@pytest.mark.timeout(900)
@CLOCKS
def test_no_order_of_events_and_two_faults_breaks_a_promise(d_runs: bool) -> None:
    assert search(State(faults=2, d_runs=d_runs)) > 10_000
