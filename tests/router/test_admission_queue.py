"""Properties of the token bucket, the admission queue and the bound of arriving requests."""

from __future__ import annotations

import math
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import Overloaded
from router.gate.admission import AdmissionController
from router.gate.admission_queue import AdmissionQueue, Ticket
from router.gate.keys import ANONYMOUS, Client, fairness_key
from router.gate.rate_limits import TokenBucket
from router.metrics import RouterMetrics

NO_TIMEOUT = math.inf


@given(
    per_minute=st.integers(1, 10_000),
    requests=st.lists(st.tuples(st.floats(0, 100), st.integers(1, 20_000)), max_size=50),
)
def test_token_bucket_keeps_its_rate_and_predicts_waits(per_minute: int, requests: list[tuple[float, int]]) -> None:
    bucket = TokenBucket(per_minute, 0.0)
    now = 0.0
    taken = 0
    largest = 0
    for pause, amount in requests:
        now += pause
        wait = bucket.wait_for(amount, now)
        if wait:
            assert bucket.wait_for(amount, now + 0.99 * wait) > 0
            now += wait + 1e-6
        assert bucket.wait_for(amount, now) == 0
        bucket.take(amount, now)
        taken += amount
        largest = max(largest, amount)
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
        self.slots = slots
        self.max_waiting = max_waiting
        self.tickets: list[Ticket] = []  # admitted or waiting, in order of arrival
        self.now = 0.0

    def arrive(self, client: str, priority: int) -> None:
        decisions: list[Overloaded | None] = []

        def on_decision(error: Overloaded | None) -> None:
            decisions.append(error)
            assert len(decisions) == 1
            if error is not None:
                self.assert_last_to_be_served(ticket)
                self.tickets.remove(ticket)

        ticket = Ticket(client, priority, 100, on_decision)
        self.tickets.append(ticket)
        try:
            self.queue.join(ticket, NO_TIMEOUT, self.now)
        except Overloaded:
            self.assert_last_to_be_served(ticket)
            self.tickets.remove(ticket)

    def assert_last_to_be_served(self, rejected: Ticket) -> None:
        """The ticket has the worst priority, no client has more tickets of it, and none of its client's came later."""
        assert len(self.waiting) == self.max_waiting + 1
        assert rejected.priority == max(ticket.priority for ticket in self.waiting)
        worst = [ticket.client for ticket in self.waiting if ticket.priority == rejected.priority]
        assert worst.count(rejected.client) == max(map(worst.count, worst))
        assert [ticket for ticket in self.waiting if self.same_line(ticket, rejected)][-1] is rejected

    def leave(self, index: int) -> None:
        ticket = self.tickets.pop(index % len(self.tickets))
        waiting = self.waiting
        self.queue.leave(ticket, self.now)
        self.queue.leave(ticket, self.now)  # a second time changes nothing
        for admitted in set(waiting) - set(self.waiting):
            assert admitted.priority == min(ticket.priority for ticket in waiting)
            assert next(ticket for ticket in waiting if self.same_line(ticket, admitted)) is admitted

    @staticmethod
    def same_line(one: Ticket, other: Ticket) -> bool:
        return (one.client, one.priority) == (other.client, other.priority)

    @property
    def waiting(self) -> list[Ticket]:
        return [ticket for ticket in self.tickets if not ticket.admitted]

    def check(self) -> None:
        admitted = len(self.tickets) - len(self.waiting)
        assert (admitted, len(self.waiting)) == (self.queue.num_admitted, self.queue.num_waiting)
        assert len(self.waiting) <= self.max_waiting
        assert min(self.slots, len(self.tickets)) <= admitted <= self.slots + self.slots // 8
        if self.waiting:
            first = min(ticket.priority for ticket in self.waiting)
            assert not any(self.few(ticket.client) for ticket in self.waiting if ticket.priority == first)

    def few(self, client: str) -> bool:
        """Whether an extra slot is free for the client."""
        admitted = [ticket.client for ticket in self.tickets if ticket.admitted]
        return len(admitted) < self.slots + self.slots // 8 and client not in admitted


@given(
    slots=st.integers(1, 17),
    max_waiting=st.integers(0, 4),
    events=st.lists(
        st.one_of(
            st.tuples(st.just("arrive"), st.integers(-2, 2), st.sampled_from("abc")),
            st.tuples(st.just("leave"), st.integers(0, 9), st.just("")),
        ),
        max_size=120,
    ),
)
def test_slots_are_granted_by_priority_then_in_order_of_each_client(
    slots: int, max_waiting: int, events: list[tuple[str, int, str]]
) -> None:
    crowd = Crowd(slots, max_waiting)
    for event, value, client in events:
        crowd.now += 1
        if event == "arrive":
            crowd.arrive(client, value)
        elif crowd.tickets:
            crowd.leave(value)
        crowd.check()


def join(queue: AdmissionQueue, client: str = "", priority: int = 0, timeout: float = NO_TIMEOUT) -> Ticket:
    ticket = Ticket(client, priority, 2000, lambda error: None)
    queue.join(ticket, timeout, 0.0)
    return ticket


def test_request_of_a_quiet_client_passes_those_of_a_busy_one() -> None:
    queue = AdmissionQueue(1, 300)
    running = join(queue, "busy")
    for _ in range(200):
        join(queue, "busy")
    quiet = join(queue, "quiet")
    queue.leave(running, 1.0)
    assert quiet.admitted


def test_quiet_clients_get_slots_beyond_those_that_a_busy_one_has_filled() -> None:
    queue = AdmissionQueue(64, 10)
    busy = [join(queue, "busy") for _ in range(74)]
    quiet = [join(queue, f"quiet {index}") for index in range(8)]
    assert all(ticket.admitted for ticket in quiet)
    assert not join(queue, "quiet 8").admitted, "there are eight of them"
    assert sum(ticket.admitted for ticket in busy) == 64
    assert queue.num_waiting == 10, (
        "a full queue lost one request of the busy client to the ninth quiet one, none before"
    )
    for ticket in quiet:
        queue.leave(ticket, 1.0)
    assert sum(ticket.admitted for ticket in busy) == 64
    assert queue.num_admitted == 65


def test_quiet_client_finds_place_in_a_queue_that_a_busy_one_has_filled() -> None:
    queue = AdmissionQueue(1, 20)
    busy = [join(queue, "busy") for _ in range(21)]
    quiet = [join(queue, "quiet") for _ in range(10)]
    assert queue.num_waiting == 20
    with pytest.raises(Overloaded):
        join(queue, "quiet")  # both wait with ten requests: the new one is rejected
    for ticket in [*busy, *quiet]:
        queue.leave(ticket, 1.0)
    assert queue.num_waiting == queue.num_admitted == 0


def test_requests_that_cost_less_than_expected_are_made_up_for() -> None:
    """Otherwise a client of short answers, which were expected to be long, would wait for others' long ones."""
    queue = AdmissionQueue(1, 300)
    running = join(queue, "short")
    queue.charge("short", 100_000)
    waiting = [join(queue, "short"), join(queue, "long")]
    queue.charge("short", -101_990)  # ten tokens in all
    queue.leave(running, 1.0)
    assert waiting[0].admitted


def test_wait_beyond_the_timeout_is_rejected_at_once() -> None:
    queue = AdmissionQueue(2, 10)
    for _ in range(3):  # each holds its slot for 6 seconds
        queue.leave(join(queue), 6.0)
    for _ in range(3):
        join(queue)
    assert queue.expected_wait(num_ahead=1) == pytest.approx(6.0)  # both slots are held for 6 s
    with pytest.raises(Overloaded, match=r"expected in 6\.0 s") as refused:
        join(queue, timeout=4.0)
    assert refused.value.retry_after == pytest.approx(2.0)
    assert not join(queue, priority=-1, timeout=4.0).admitted  # a higher priority is expected to wait 3 s
    join(queue)
    assert not join(queue, "other", timeout=9.0).admitted  # only one of the two waiting requests passes it


def test_fail_waiting_rejects_every_waiting_ticket() -> None:
    queue = AdmissionQueue(1, 5)
    decisions: list[Overloaded | None] = []
    for _ in range(3):
        queue.join(Ticket("", 0, 100, decisions.append), NO_TIMEOUT, 0.0)
    error = Overloaded("enough")
    queue.fail_waiting(error)
    assert decisions == [error, error]
    assert queue.num_waiting == 0


def test_slow_bodies_of_one_client_do_not_keep_others_out() -> None:
    admission = AdmissionController(64, 0, RouterMetrics())
    with ExitStack() as requests:
        for _ in range(64):
            requests.enter_context(admission.enter(ANONYMOUS, "10.0.0.1"))
        for address in ("10.0.0.1", *(f"10.0.1.{index}" for index in range(8)), "10.0.0.3"):
            if address.startswith("10.0.1"):
                requests.enter_context(admission.enter(ANONYMOUS, address))
            else:
                with pytest.raises(Overloaded, match="are arriving"):
                    requests.enter_context(admission.enter(ANONYMOUS, address))
    assert not admission._by_client


@pytest.mark.parametrize(
    ("name", "address", "key"),
    [
        ("alice", "10.0.0.1", "alice"),
        ("", "10.0.0.1", "10.0.0.1"),
        ("", "::ffff:10.0.0.1", "10.0.0.1"),
        ("", "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("", "fe80::1%eth0", "fe80::/64"),
        ("", "::1", "::/64"),
        ("", "", ""),
    ],
)
def test_client_is_a_key_or_a_network(name: str, address: str, key: str) -> None:
    assert fairness_key(Client(name=name), address) == key
