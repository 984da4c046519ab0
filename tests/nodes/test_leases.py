"""LeaseTable against a model: each lease ends once, in one way."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_node.leases import LeaseState, LeaseTable

EPOCH, SECONDS, GUARD, TERMS = "mine", 3.0, 1.0, 10

_operations = st.lists(
    st.one_of(
        st.just(("accept", 0)),
        st.tuples(
            st.sampled_from(["announce", "announce last", "extend", "release", "hang up"]), st.integers(0, 4)
        ),  # how many leases ago
        st.tuples(st.sampled_from(["wait", "wait on time"]), st.integers(0, 5)),
    ),
    max_size=60,
)


@dataclass
class _Lease:
    ends: float = inf
    announced: float = 0.0
    complete: bool = False


@given(_operations)
def test_every_lease_ends_once_and_its_blocks_are_freed_once(operations: list[tuple[str, int]]) -> None:
    table, now = LeaseTable(EPOCH, SECONDS, GUARD), 0.0
    model: dict[int, _Lease] = {}  # those that have not ended
    ended: dict[int, str] = {}
    accepted, granted = 10, 0  # so that there are numbers before the first one

    def end(lease: int, how: str) -> None:
        del model[lease]
        assert lease not in ended
        ended[lease] = how

    for operation, value in operations:
        lease = accepted - 1 - value
        entry = model.get(lease)
        stands = entry is not None
        match operation:
            case "accept":
                table.accept(accepted)
                model[accepted] = _Lease()
                accepted += 1
            case "announce" | "announce last":
                assert table.announce(lease, operation == "announce last", now) == stands
                if entry is not None and stands:
                    granted += entry.ends == inf
                    entry.ends, entry.announced = min(entry.ends, now + SECONDS + GUARD), now
                    entry.complete = operation == "announce last"
            case "extend":
                kept = table.extend(EPOCH, lease, now)
                if entry is not None and stands and entry.ends < inf:
                    latest = entry.announced + TERMS * SECONDS
                    entry.ends = max(entry.ends, min(now + SECONDS, latest) + GUARD)
                    assert kept == pytest.approx(max(0.0, entry.ends - GUARD - now))
                else:
                    assert kept == 0
            case "release":
                kept, free = table.release(EPOCH, lease)
                assert free == stands
                if entry is not None and stands:
                    end(lease, "released" if entry.complete else "aborted" if entry.ends < inf else "never granted")
                assert kept == (ended.get(lease) == "released")
            case "hang up":
                assert table.cancel(lease) == (entry is not None and entry.ends == inf)
                if entry is not None and entry.ends == inf:
                    end(lease, "never granted")
            case _:
                now += value
                if operation == "wait on time":
                    overdue = [lease for lease, entry in model.items() if entry.ends <= now]
                    assert sorted(table.expire(now)) == overdue
                    for lease in overdue:
                        end(lease, "expired")
        ends = [entry.ends for entry in model.values() if entry.ends < inf]
        assert len(table) == len(ends)
        assert table.next_expiry() == min(ends, default=None)
    counts = {state: list(ended.values()).count(state) for state in LeaseState}
    assert table.counts == {**counts, LeaseState.GRANTED: granted}


def complete(table: LeaseTable, lease: int, now: float = 0.0) -> None:
    table.accept(lease)
    assert table.announce(lease, True, now)


def test_a_repeated_release_gets_the_same_answer_until_it_is_forgotten() -> None:
    table = LeaseTable(EPOCH, SECONDS, GUARD, remember=2)
    for lease in range(3):
        complete(table, lease)
        assert table.release(EPOCH, lease) == (True, True)
    assert table.release(EPOCH, 2) == (True, False)
    assert table.release(EPOCH, 0) == (False, False)  # forgotten: the safe answer


def test_an_expired_lease_did_not_stand() -> None:
    table = LeaseTable(EPOCH, SECONDS, GUARD)
    table.accept(7)
    assert table.expire(1e9) == []
    assert table.announce(7, False, 0.0)
    assert table.announce(7, True, 1.0), "its time runs from the first blocks"
    assert table.expire(SECONDS + GUARD - 0.001) == []
    assert table.expire(SECONDS + GUARD) == [7]
    assert table.extend(EPOCH, 7, 0.0) == 0
    assert table.release(EPOCH, 7) == (False, False)
    assert table.expire(1e9) == []


def test_an_extended_lease_outlives_its_first_end() -> None:
    table = LeaseTable(EPOCH, SECONDS, GUARD)
    complete(table, 7)
    assert table.extend(EPOCH, 7, 2.0) == SECONDS
    assert table.expire(2.0 + SECONDS + GUARD - 0.001) == []
    assert table.release(EPOCH, 7) == (True, True)


def test_messages_of_another_epoch_change_nothing() -> None:
    table = LeaseTable(EPOCH, SECONDS, GUARD)
    complete(table, 7)
    assert table.extend("another", 7, 2.0) == 0
    assert table.release("another", 7) == (False, False)
    assert table.next_expiry() == SECONDS + GUARD
    assert table.release(EPOCH, 7) == (True, True)
    assert table.release("another", 7) == (False, False)


def test_extensions_are_bounded() -> None:
    table, now = LeaseTable(EPOCH, SECONDS, GUARD), 5.0
    complete(table, 7, now)
    while table.extend(EPOCH, 7, now):
        now += 1.0
    assert now == pytest.approx(5.0 + TERMS * SECONDS)
    assert table.expire(now + GUARD) == [7]
