"""LeaseTable against a model: each lease ends once, in one way."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.leasing.leases import Lease, LeaseId, LeaseState, LeaseTable

SECONDS = 3.0
GUARD = 1.0
TERMS = 10
STREAMS = 3

_operations = st.lists(
    st.one_of(
        st.just(("accept", 0)),
        st.tuples(
            st.sampled_from(["announce", "announce last", "extend", "release", "cancel", "revoke"]), st.integers(0, 4)
        ),  # leases accepted after the named one
        st.tuples(st.sampled_from(["wait", "wait on time"]), st.integers(0, 5)),
    ),
    max_size=60,
)


def id_of(number: int) -> LeaseId:
    """Streams use the same numbers."""
    return LeaseId(number % STREAMS, number // STREAMS)


def new_table() -> LeaseTable[Lease]:
    return LeaseTable(SECONDS, GUARD)


def expired(table: LeaseTable[Lease], now: float) -> list[LeaseId]:
    return [lease.id for lease in table.expire(now)]


@dataclass
class _Expected:
    ends: float = inf
    announced: float = 0.0
    complete: bool = False


@given(_operations)
def test_every_lease_ends_once_and_its_blocks_are_freed_once(operations: list[tuple[str, int]]) -> None:
    table = new_table()
    now = 0.0
    model: dict[LeaseId, _Expected] = {}  # leases that have not ended
    ended: dict[LeaseId, str] = {}
    accepted = 10  # operations may name leases 6 to 9, which were never accepted
    granted = 0

    def end(lease: LeaseId, how: str) -> None:
        del model[lease]
        assert lease not in ended
        ended[lease] = how

    for operation, value in operations:
        lease = id_of(accepted - 1 - value)
        entry = model.get(lease)
        stands = entry is not None
        match operation:
            case "accept":
                table.accept(Lease(id_of(accepted)))
                model[id_of(accepted)] = _Expected()
                accepted += 1
            case "announce" | "announce last":
                assert table.announce(lease, operation == "announce last", now) == stands
                if entry is not None and stands:
                    granted += entry.ends == inf
                    entry.ends = min(entry.ends, now + SECONDS + GUARD)
                    entry.announced = now
                    entry.complete = operation == "announce last"
            case "extend":
                kept = table.extend(lease, now)
                if entry is not None and stands and entry.ends < inf:
                    latest = entry.announced + TERMS * SECONDS
                    entry.ends = max(entry.ends, min(now + SECONDS, latest) + GUARD)
                    assert kept == pytest.approx(max(0.0, entry.ends - GUARD - now))
                else:
                    assert kept == 0
            case "release":
                kept, free = table.release(lease)
                assert free == stands
                if entry is not None and stands:
                    end(lease, "released" if entry.complete else "aborted" if entry.ends < inf else "never granted")
                assert kept == (stands and ended[lease] == "released")
            case "revoke":
                assert table.revoke(lease) == stands
                if entry is not None and stands:
                    end(lease, "revoked" if entry.ends < inf else "never granted")
            case "cancel":
                assert table.cancel(lease) == (entry is not None and entry.ends == inf)
                if entry is not None and entry.ends == inf:
                    end(lease, "never granted")
            case _:
                now += value
                if operation == "wait on time":
                    overdue = [lease for lease, entry in model.items() if entry.ends <= now]
                    assert sorted(expired(table, now)) == sorted(overdue)
                    for lease in overdue:
                        end(lease, "expired")
        ends = [entry.ends for entry in model.values() if entry.ends < inf]
        assert sum(lease.granted for lease in table) == len(ends)
        assert table.next_expiry() == min(ends, default=None)
    counts = {state: list(ended.values()).count(state) for state in LeaseState}
    assert table.counts == {**counts, LeaseState.GRANTED: granted}


SEVEN = LeaseId(1, 7)


def complete(table: LeaseTable[Lease], lease: LeaseId, now: float = 0.0) -> None:
    table.accept(Lease(lease))
    assert table.announce(lease, True, now)


def test_a_lease_stands_at_its_first_release_only() -> None:
    table = new_table()
    complete(table, SEVEN)
    assert table.release(SEVEN) == (True, True)
    assert table.release(SEVEN) == (False, False)


def test_an_expired_lease_did_not_stand() -> None:
    table = new_table()
    table.accept(Lease(SEVEN))
    assert expired(table, 1e9) == []
    assert table.announce(SEVEN, False, 0.0)
    assert table.announce(SEVEN, True, 1.0), "its time runs from the first blocks"
    assert expired(table, SECONDS + GUARD - 0.001) == []
    assert expired(table, SECONDS + GUARD) == [SEVEN]
    assert table.extend(SEVEN, 0.0) == 0
    assert table.release(SEVEN) == (False, False)
    assert expired(table, 1e9) == []


def test_a_revoked_lease_did_not_stand() -> None:
    table = new_table()
    complete(table, SEVEN)
    assert table.revoke(SEVEN)
    assert not table.revoke(SEVEN)
    assert table.extend(SEVEN, 0.0) == 0
    assert table.release(SEVEN) == (False, False)
    assert expired(table, 1e9) == []


def test_an_extended_lease_outlives_its_first_end() -> None:
    table = new_table()
    complete(table, SEVEN)
    assert table.extend(SEVEN, 2.0) == SECONDS
    assert expired(table, 2.0 + SECONDS + GUARD - 0.001) == []
    assert table.release(SEVEN) == (True, True)


def test_another_stream_changes_nothing_with_the_same_number() -> None:
    table = new_table()
    other = LeaseId(2, 7)
    complete(table, SEVEN)
    assert table.get(other) is None
    assert table.extend(other, 2.0) == 0
    assert table.release(other) == (False, False)
    assert not table.cancel(other)
    assert table.next_expiry() == SECONDS + GUARD
    assert table.release(SEVEN) == (True, True)


def test_extensions_are_bounded() -> None:
    table = new_table()
    now = 5.0
    complete(table, SEVEN, now)
    while table.extend(SEVEN, now):
        now += 1.0
    assert now == pytest.approx(5.0 + TERMS * SECONDS)
    assert expired(table, now + GUARD) == [SEVEN]
