"""Exhaustive search over all orders of events of one handoff with a few faults. See docs/leases.md."""

from __future__ import annotations

import pickle
from collections import deque
from math import inf
from typing import Any

import pytest
from lease_states import State, check, faults, moves

from node.leasing.leases import Lease, LeaseId, LeaseTable
from node.reading.handoff import Action, Handoff, Phase
from pdserve.ipc.messages import KVConfirmed


def search(initial: State) -> int:
    """Visit all states and return their number. Raises AssertionError with the shortest path to a bad state."""
    first = initial.freeze()
    came_from: dict[bytes, tuple[bytes, str] | None] = {first: None}
    queue = deque([first])
    while queue:
        frozen = queue.popleft()
        state: State = pickle.loads(frozen)
        events = [(move, False) for move in moves(state)]
        if state.faults:
            events += [(fault, True) for fault in faults(state)]
        for event, is_fault in events:
            state = pickle.loads(frozen)
            name = str(getattr(event, "func", event).__name__)
            try:
                state.faults -= is_fault
                event(state)
                check(state)
            except AssertionError as error:
                raise AssertionError(f"{error}, after {', '.join([*_path(came_from, frozen), name])}") from error
            following = state.freeze()
            if following not in came_from:
                came_from[following] = (frozen, name)
                queue.append(following)
    return len(came_from)


def _path(came_from: dict[bytes, tuple[bytes, str] | None], frozen: bytes) -> list[str]:
    path: list[str] = []
    while (step := came_from[frozen]) is not None:
        frozen, name = step
        path.insert(0, name)
    return path


@pytest.mark.parametrize(
    ("num_faults", "d_runs", "pull"),
    [
        *((2, False, False), (2, False, True)),
        *(pytest.param(1, True, pull, marks=pytest.mark.slow) for pull in (False, True)),
        *(pytest.param(2, True, pull, marks=[pytest.mark.slow, pytest.mark.timeout(900)]) for pull in (False, True)),
    ],
)
def test_no_order_of_events_and_faults_breaks_a_promise(num_faults: int, d_runs: bool, pull: bool) -> None:
    """With a stopped clock, D may read blocks that P has reused, but must not use them."""
    assert search(State(num_faults, d_runs, pull=pull)) > 1000


@pytest.mark.parametrize(("num_faults", "due"), [(0, 1.0), (0, 2.0), pytest.param(1, 2.0, marks=pytest.mark.slow)])
def test_a_pull_that_is_given_up_when_it_is_due_breaks_no_promise(num_faults: int, due: float) -> None:
    assert search(State(num_faults, True, pull=True, due=due)) > 1000


@pytest.mark.parametrize(
    ("num_faults", "d_runs", "due"),
    [
        (0, True, inf),
        (1, False, inf),
        *(pytest.param(1, True, due, marks=pytest.mark.slow) for due in (inf, 2.0)),
        pytest.param(2, False, inf, marks=pytest.mark.slow),
        pytest.param(2, True, inf, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_a_lease_that_is_taken_back_breaks_no_promise(num_faults: int, d_runs: bool, due: float) -> None:
    """P reuses the blocks at once, also while D reads them."""
    assert search(State(num_faults, d_runs, pull=True, due=due, revocable=True)) > 1000


class NoConfirmation(Handoff):
    """D uses what it has read without waiting for P's answer whether the lease stood."""

    def _next_actions(self, now: float) -> list[Action]:
        actions = super()._next_actions(now)
        if self.phase is Phase.CONFIRMING:
            self.phase = Phase.CONFIRMED
            actions.append(KVConfirmed(self._rid, self.announced, ()))
        return actions


class RevokedLeasesStand(LeaseTable[Lease]):
    """P frees the blocks of a lease that it takes back, and confirms the lease all the same."""

    def __init__(self, seconds: float, guard: float) -> None:
        super().__init__(seconds, guard)
        self._revoked: list[LeaseId] = []

    def revoke(self, lease: LeaseId) -> bool:
        self._revoked.append(lease)
        return super().revoke(lease)

    def release(self, lease: LeaseId) -> tuple[bool, bool]:
        stood, free = super().release(lease)
        return stood or lease in self._revoked, free


class IgnoredRevocations(LeaseTable[Lease]):
    """P's engine asks for a lease in vain."""

    def revoke(self, lease: LeaseId) -> bool:
        return False


@pytest.mark.parametrize(
    ("defect", "message"),
    [
        ({"make_handoff": NoConfirmation}, "D uses KV that P has not computed, after .*p_takes_the_lease_back"),
        ({"make_table": RevokedLeasesStand}, "D uses KV that P has not computed, after .*p_takes_the_lease_back"),
        ({"make_table": IgnoredRevocations}, "P waits for blocks that stay leased"),
    ],
    ids=["no confirmation", "revoked leases stand", "ignored revocations"],
)
def test_the_search_finds_defects_of_revocations(defect: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        search(State(0, True, pull=True, revocable=True, **defect))


class SharedLeases(LeaseTable[Lease]):
    """Leases that every stream can name."""

    def release(self, lease: LeaseId) -> tuple[bool, bool]:
        return super().release(next((held for held in self._leases if held.request == lease.request), lease))


def test_the_search_finds_a_release_by_another_stream() -> None:
    with pytest.raises(AssertionError, match=r"P freed blocks that D may read, after .*hostile_releases"):
        search(State(0, True, SharedLeases))
