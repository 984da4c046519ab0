"""The lease table against a model of it: each lease ends once, in one way, and says so for ever after."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_node.leases import LeaseState, LeaseTable

SECONDS, GUARD = 3.0, 1.0

_operations = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), st.just(0)),
        st.tuples(st.sampled_from(["start", "start last", "release", "abort"]), st.integers(0, 12)),
        st.tuples(st.just("wait"), st.integers(0, 5)),
    ),
    max_size=60,
)


@given(_operations)
def test_every_lease_ends_once_and_its_blocks_are_freed_once(operations: list[tuple[str, int]]) -> None:
    table, now = LeaseTable(SECONDS, GUARD), 0.0
    ends: dict[int, float] = {}  # standing leases of the model; infinity while their prompts are computed
    started: set[int] = set()
    released: set[int] = set()
    freed: list[int] = []
    granted = 0
    for operation, value in operations:
        if operation == "grant":
            table.grant(granted)
            ends[granted] = math.inf
            granted += 1
        elif operation.startswith("start"):
            lease = value if operation == "start" else granted - 1
            if lease in range(granted) and lease not in started:  # it happens once
                started.add(lease)
                table.start(lease, now)
                if lease in ends:
                    ends[lease] = now + SECONDS + GUARD
        elif operation == "release":
            stood, free = table.release(value)
            assert free == (value in ends)
            if free:
                released.add(value)
                freed.append(value)
                del ends[value]
            assert stood == (value in released)
        elif operation == "abort":
            assert table.abort(value) == (value in ends)
            if ends.pop(value, None) is not None:
                freed.append(value)
        else:
            now += value
            expired = table.expire(now)
            assert sorted(expired) == sorted(lease for lease, end in ends.items() if end <= now)
            for lease in expired:
                freed.append(lease)
                del ends[lease]
        assert len(table) == len(ends)
        assert table.next_expiry() == min((end for end in ends.values() if end < math.inf), default=None)
    assert len(freed) == len(set(freed))
    counts = table.counts
    ended = counts[LeaseState.RELEASED] + counts[LeaseState.EXPIRED] + counts[LeaseState.ABORTED]
    assert counts[LeaseState.GRANTED] == granted == ended + len(table)


def test_a_repeated_release_says_the_same_until_it_is_forgotten() -> None:
    table = LeaseTable(SECONDS, GUARD, remember=2)
    for lease in range(3):
        table.grant(lease)
        assert table.release(lease) == (True, True)
    assert table.release(2) == (True, False)
    assert table.release(0) == (False, False)  # forgotten: the safe answer


@pytest.mark.parametrize("late", [0.0, 100.0])
def test_an_expired_lease_has_not_stood(late: float) -> None:
    table = LeaseTable(SECONDS, GUARD)
    table.grant(7)
    assert table.expire(1e9) == []
    table.start(7, 0.0)
    assert table.expire(SECONDS + GUARD - 0.001) == []
    assert table.expire(SECONDS + GUARD + late) == [7]
    assert table.release(7) == (False, False)
    assert table.expire(1e9) == []
