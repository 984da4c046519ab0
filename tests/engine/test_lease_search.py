"""Every order of events that one handoff and a few faults can meet. See docs/leases.md."""

from __future__ import annotations

import pickle
from collections import deque

import pytest
from lease_states import State, check, faults, moves


def search(initial: State) -> int:
    """Visit every state; returns how many. Raises AssertionError with the shortest way to one that must not be."""
    first = initial.freeze()
    came_from: dict[bytes, tuple[bytes, str] | None] = {first: None}
    queue = deque([first])
    while queue:
        frozen = queue.popleft()
        state: State = pickle.loads(frozen)
        happenings = [(move, False) for move in moves(state)]
        if state.faults:
            happenings += [(fault, True) for fault in faults(state)]
        for happen, is_fault in happenings:
            state = pickle.loads(frozen)
            name = str(getattr(happen, "func", happen).__name__)
            try:
                state.faults -= is_fault
                happen(state)
                check(state)
            except AssertionError as error:
                raise AssertionError(f"{error}, after {', '.join([*_way(came_from, frozen), name])}") from error
            following = state.freeze()
            if following not in came_from:
                came_from[following] = (frozen, name)
                queue.append(following)
    return len(came_from)


def _way(came_from: dict[bytes, tuple[bytes, str] | None], frozen: bytes) -> list[str]:
    way: list[str] = []
    while (step := came_from[frozen]) is not None:
        frozen, name = step
        way.insert(0, name)
    return way


@pytest.mark.parametrize(
    ("num_faults", "d_runs"),
    [(1, True), (2, False), pytest.param(2, True, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_no_order_of_events_and_faults_breaks_a_promise(num_faults: int, d_runs: bool) -> None:
    """Where D's clock stands still, it may read what is somebody else's by then, but not use it."""
    assert search(State(num_faults, d_runs)) > 1000
