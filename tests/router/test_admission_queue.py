"""Properties of the token bucket and the admission queue."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import Overloaded
from router.gate.admission_queue import AdmissionQueue, Ticket
from router.gate.rate_limits import TokenBucket

NO_TIMEOUT = math.inf


@given(
    per_minute=st.integers(1, 10_000),
    requests=st.lists(st.tuples(st.floats(0, 100), st.integers(1, 20_000)), max_size=50),
)
def test_token_bucket_keeps_its_rate_and_predicts_waits(per_minute: int, requests: list[tuple[float, int]]) -> None:
    bucket, now, taken, largest = TokenBucket(per_minute, 0.0), 0.0, 0, 0
    for pause, amount in requests:
        now += pause
        wait = bucket.wait_for(amount, now)
        if wait:
            assert bucket.wait_for(amount, now + 0.99 * wait) > 0
            now += wait + 1e-6
        assert bucket.wait_for(amount, now) == 0
        bucket.take(amount, now)
        taken, largest = taken + amount, max(largest, amount)
        # Only a request larger than the bucket overdraws it, once.
        assert taken <= per_minute * (1 + now / 60) + max(0, largest - per_minute) + 1e-3 * per_minute + 1e-3


@given(before=st.integers(1, 1000), after=st.integers(1, 1000), used=st.integers(0, 1000))
def test_resized_bucket_keeps_usage(before: int, after: int, used: int) -> None:
    bucket = TokenBucket(before, 0.0)
    bucket.take(used, 0.0)
    bucket.resize(after, 0.0)
    assert bucket.level(0.0) == after - used


class Crowd:
    """Requests at an admission queue, with the decision that each received."""

    def __init__(self, slots: int, max_waiting: int) -> None:
        self.queue = AdmissionQueue(slots, max_waiting)
        self.slots, self.max_waiting = slots, max_waiting
        self.tickets: list[Ticket] = []  # admitted or waiting
        self.now = 0.0

    def arrive(self, priority: int) -> None:
        decisions: list[Overloaded | None] = []

        def on_decision(error: Overloaded | None) -> None:
            decisions.append(error)
            assert len(decisions) == 1
            if error is not None:
                assert ticket.order == max(each.order for each in self.waiting)
                self.tickets.remove(ticket)

        waiting, order = self.waiting, (priority, math.inf)
        try:
            ticket = self.queue.join(priority, NO_TIMEOUT, self.now, on_decision)
        except Overloaded:
            assert len(waiting) == self.max_waiting
            assert all(each.order < order for each in waiting)
        else:
            self.tickets.append(ticket)

    def leave(self, index: int) -> None:
        ticket = self.tickets.pop(index % len(self.tickets))
        first = min((each.order for each in self.waiting), default=None)
        was_admitted = ticket.admitted
        self.queue.leave(ticket, self.now)
        self.queue.leave(ticket, self.now)  # a second time changes nothing
        if was_admitted and first is not None:
            assert next(each for each in self.tickets if each.order == first).admitted

    @property
    def waiting(self) -> list[Ticket]:
        return [ticket for ticket in self.tickets if not ticket.admitted]

    def check(self) -> None:
        admitted = len(self.tickets) - len(self.waiting)
        assert (admitted, len(self.waiting)) == (self.queue.num_admitted, self.queue.num_waiting)
        assert len(self.waiting) <= self.max_waiting
        assert admitted == min(self.slots, len(self.tickets))


@given(
    slots=st.integers(1, 4),
    max_waiting=st.integers(0, 4),
    events=st.lists(
        st.one_of(st.tuples(st.just("arrive"), st.integers(-2, 2)), st.tuples(st.just("leave"), st.integers(0, 9)))
    ),
)
def test_slots_are_granted_by_priority_then_arrival(
    slots: int, max_waiting: int, events: list[tuple[str, int]]
) -> None:
    crowd = Crowd(slots, max_waiting)
    for event, value in events:
        crowd.now += 1
        if event == "arrive":
            crowd.arrive(value)
        elif crowd.tickets:
            crowd.leave(value)
        crowd.check()


def test_wait_beyond_the_timeout_is_rejected_at_once() -> None:
    queue = AdmissionQueue(2, 10)
    for _ in range(3):  # each holds its slot for 6 seconds
        queue.leave(queue.join(0, NO_TIMEOUT, 0.0, lambda error: None), 6.0)
    for _ in range(3):
        queue.join(0, NO_TIMEOUT, 6.0, lambda error: None)
    assert queue.expected_wait(num_ahead=1) == pytest.approx(6.0)  # both slots are held for 6 s
    with pytest.raises(Overloaded, match=r"expected in 6\.0 s") as refused:
        queue.join(0, 4.0, 6.0, lambda error: None)
    assert refused.value.retry_after == pytest.approx(2.0)
    assert not queue.join(-1, 4.0, 6.0, lambda error: None).admitted  # a higher priority is expected to wait 3 s


def test_fail_waiting_rejects_every_waiting_ticket() -> None:
    queue = AdmissionQueue(1, 5)
    decisions: list[Overloaded | None] = []
    for _ in range(3):
        queue.join(0, NO_TIMEOUT, 0.0, decisions.append)
    error = Overloaded("enough")
    queue.fail_waiting(error)
    assert decisions == [error, error]
    assert queue.num_waiting == 0
