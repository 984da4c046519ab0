"""The pure parts of admission: what must hold whatever comes in which order."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import Overloaded
from router.gate.admission_queue import AdmissionQueue, Ticket
from router.gate.token_bucket import TokenBucket

PATIENT = math.inf


@given(
    per_minute=st.integers(1, 10_000),
    visits=st.lists(st.tuples(st.floats(0, 100), st.integers(1, 20_000)), max_size=50),
)
def test_a_bucket_gives_what_its_rate_allows_and_says_when_there_is_more(
    per_minute: int, visits: list[tuple[float, int]]
) -> None:
    bucket, now, given_out, largest = TokenBucket(per_minute, 0.0), 0.0, 0, 0
    for pause, amount in visits:
        now += pause
        wait = bucket.wait_for(amount, now)
        if wait:
            assert bucket.wait_for(amount, now + 0.99 * wait) > 0
            now += wait + 1e-6
        assert bucket.wait_for(amount, now) == 0
        bucket.take(amount, now)
        given_out, largest = given_out + amount, max(largest, amount)
        # What is larger than the bucket overdraws it, once; all else is within the rate.
        assert given_out <= per_minute * (1 + now / 60) + max(0, largest - per_minute) + 1e-3 * per_minute + 1e-3


@given(before=st.integers(1, 1000), after=st.integers(1, 1000), used=st.integers(0, 1000))
def test_another_limit_forgives_nothing(before: int, after: int, used: int) -> None:
    bucket = TokenBucket(before, 0.0)
    bucket.take(used, 0.0)
    bucket.resize(after, 0.0)
    assert bucket.level(0.0) == after - used


class Crowd:
    """Requests at a line, and what each has heard."""

    def __init__(self, places: int, max_waiting: int) -> None:
        self.line = AdmissionQueue(places, max_waiting)
        self.places, self.max_waiting = places, max_waiting
        self.tickets: list[Ticket] = []  # inside: at a place, or waiting
        self.now = 0.0

    def arrive(self, priority: int) -> None:
        heard: list[Overloaded | None] = []

        def on_turn(error: Overloaded | None) -> None:
            heard.append(error)
            assert len(heard) == 1
            if error is not None:
                assert ticket.order == max(each.order for each in self.waiting)
                self.tickets.remove(ticket)

        waiting, order = self.waiting, (priority, math.inf)
        try:
            ticket = self.line.join(priority, PATIENT, self.now, on_turn)
        except Overloaded:
            assert len(waiting) == self.max_waiting
            assert all(each.order < order for each in waiting)
        else:
            self.tickets.append(ticket)

    def leave(self, index: int) -> None:
        ticket = self.tickets.pop(index % len(self.tickets))
        first = min((each.order for each in self.waiting), default=None)
        had_place = ticket.admitted
        self.line.leave(ticket, self.now)
        self.line.leave(ticket, self.now)  # a second time changes nothing
        if had_place and first is not None:
            assert next(each for each in self.tickets if each.order == first).admitted

    @property
    def waiting(self) -> list[Ticket]:
        return [ticket for ticket in self.tickets if not ticket.admitted]

    def check(self) -> None:
        admitted = len(self.tickets) - len(self.waiting)
        assert (admitted, len(self.waiting)) == (self.line.num_admitted, self.line.num_waiting)
        assert len(self.waiting) <= self.max_waiting
        assert admitted == min(self.places, len(self.tickets))


@given(
    places=st.integers(1, 4),
    max_waiting=st.integers(0, 4),
    events=st.lists(
        st.one_of(st.tuples(st.just("arrive"), st.integers(-2, 2)), st.tuples(st.just("leave"), st.integers(0, 9)))
    ),
)
def test_places_go_to_the_first_by_priority_and_arrival(
    places: int, max_waiting: int, events: list[tuple[str, int]]
) -> None:
    crowd = Crowd(places, max_waiting)
    for event, value in events:
        crowd.now += 1
        if event == "arrive":
            crowd.arrive(value)
        elif crowd.tickets:
            crowd.leave(value)
        crowd.check()


def test_a_wait_longer_than_the_time_limit_is_refused_at_once() -> None:
    line = AdmissionQueue(2, 10)
    for _ in range(3):  # each takes its place for 6 seconds
        line.leave(line.join(0, PATIENT, 0.0, lambda error: None), 6.0)
    for _ in range(3):
        line.join(0, PATIENT, 6.0, lambda error: None)
    assert line.expected_wait(ahead=1) == pytest.approx(6.0)  # two of two places each six seconds
    with pytest.raises(Overloaded, match=r"expected in 6\.0 s") as refused:
        line.join(0, 4.0, 6.0, lambda error: None)
    assert refused.value.retry_after == pytest.approx(2.0)
    assert not line.join(-1, 4.0, 6.0, lambda error: None).admitted  # one of more weight is to wait 3 s


def test_those_who_wait_can_be_sent_away() -> None:
    line = AdmissionQueue(1, 5)
    heard: list[Overloaded | None] = []
    for _ in range(3):
        line.join(0, PATIENT, 0.0, heard.append)
    error = Overloaded("enough")
    line.dismiss(error)
    assert heard == [error, error]
    assert line.num_waiting == 0
