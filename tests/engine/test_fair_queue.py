"""The fair queue: bounds on how much cost passes a waiting request, for any order of arrivals and corrections."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.fairness.fair_queue import FairQueue

QUANTUM = 10
LARGEST = 100


@dataclass(eq=False)
class Item:
    client: int
    level: int
    cost: int
    passed: int = 0  # cost of other clients served while it was its client's first


def serve(queue: FairQueue[int, Item]) -> Item:
    item = queue.head
    assert item is not None
    queue.take(item, item.client, item.level, item.cost)
    return item


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 5), st.integers(1, LARGEST)),
        st.tuples(st.just("serve"), st.just(0), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 50), st.just(0)),
    ),
    max_size=120,
)


@given(events=EVENTS, levels=st.integers(1, 3))
def test_levels_are_in_order_and_clients_are_first_in_first_out(
    events: list[tuple[str, int, int]], levels: int
) -> None:
    queue = FairQueue[int, Item](QUANTUM)
    waiting = list[Item]()
    for event, value, cost in events:
        if event == "push":
            waiting.append(Item(value, cost % levels, cost))
            queue.push(waiting[-1], value, waiting[-1].level)
        elif event == "serve" and waiting:
            item = serve(queue)
            assert item.level == min(other.level for other in waiting)
            line = [other for other in waiting if (other.client, other.level) == (item.client, item.level)]
            assert line[0] is item
            waiting.remove(item)
        elif event == "remove" and waiting:
            item = waiting.pop(value % len(waiting))
            queue.remove(item, item.client, item.level)
        assert len(queue) == len(waiting)
        assert set(queue) == set(waiting)
        assert (queue.head is None) == (not waiting), "it serves whenever a request waits"


@given(events=EVENTS)
def test_cost_that_passes_a_request_is_bounded(events: list[tuple[str, int, int]]) -> None:
    """A request waits for as many rounds as its client's last one overdrew, and two more."""
    queue = FairQueue[int, Item](QUANTUM)
    waiting = defaultdict[int, list[Item]](list)
    bound = 5 * (2 + LARGEST // QUANTUM) * (QUANTUM + LARGEST)  # five other clients
    for event, value, cost in events:
        if event == "push":
            item = Item(value, 0, cost)
            waiting[value].append(item)
            queue.push(item, value, 0)
        elif event == "serve" and len(queue):
            item = serve(queue)
            waiting[item.client].remove(item)
            for client, line in waiting.items():
                if line and client != item.client:
                    line[0].passed += item.cost
                    assert line[0].passed <= bound


@given(costs=st.lists(st.integers(1, LARGEST), min_size=2, max_size=6))
def test_clients_that_always_wait_get_equal_cost(costs: list[int]) -> None:
    queue = FairQueue[int, Item](QUANTUM)
    served = Counter[int]()
    for _ in range(400):
        for client, cost in enumerate(costs):
            queue.push(Item(client, 0, cost), client, 0)
    for _ in range(400):
        item = serve(queue)
        served[item.client] += max(item.cost, QUANTUM)
    shares = [served[client] for client in range(len(costs))]
    assert max(shares) - min(shares) <= 2 * (QUANTUM + LARGEST)


@given(idle=st.integers(0, 50), refund=st.integers(0, 10_000))
def test_idle_or_refunded_client_saves_one_round_at_most(idle: int, refund: int) -> None:
    queue = FairQueue[int, Item](QUANTUM)
    queue.charge(1, -refund)
    for _ in range(idle):
        queue.push(Item(0, 0, LARGEST), 0, 0)
        serve(queue)
    for _ in range(4 * LARGEST):
        for client in (0, 1):
            queue.push(Item(client, 0, 1), client, 0)
    served = Counter(serve(queue).client for _ in range(4 * LARGEST))
    assert served[1] - served[0] <= LARGEST + 2 * QUANTUM  # the other client owes at most its last request


def test_requests_of_ever_new_clients_do_not_starve_an_overdrawn_one() -> None:
    queue = FairQueue[int, Item](QUANTUM)
    queue.push(Item(0, 0, LARGEST), 0, 0)
    serve(queue)
    queue.push(Item(0, 0, LARGEST), 0, 0)
    queue.push(Item(1, 0, 1), 1, 0)
    served = 0
    for client in range(2, 1000):  # a new one always waits
        queue.push(Item(client, 0, 1), client, 0)
        served += 1
        if serve(queue).client == 0:
            break
    assert served <= 2 * (2 + LARGEST // QUANTUM)


def test_new_clients_need_bounded_memory_and_the_largest_debt_is_kept() -> None:
    queue = FairQueue[int, Item](QUANTUM)
    queue.charge(-1, 10_000_000)
    for client in range(100_000):
        queue.push(Item(client, 0, 1), client, 0)
        serve(queue)
    assert len(queue._spent) <= 4096
    queue.push(Item(-1, 0, 1), -1, 0)
    queue.push(Item(100_000, 0, 1), 100_000, 0)
    assert serve(queue).client == 100_000


def test_full_queue_rejects_of_the_worst_level_the_last_of_the_largest_client() -> None:
    queue = FairQueue[int, Item](QUANTUM)
    items = [Item(client, level, 1) for client, level in ((1, 0), (1, 0), (1, 0), (2, 0), (2, 0), (3, 0))]
    for item in items:
        queue.push(item, item.client, item.level)
    assert queue.to_reject(3, 0) is items[2]
    assert queue.to_reject(4, 0) is items[2]
    assert queue.to_reject(2, 0) is None, "it would have as many as the largest"
    assert queue.to_reject(1, 0) is None
    assert queue.to_reject(1, -1) is items[2], "an urgent request displaces any"
    assert queue.to_reject(3, 1) is None
    assert queue.ahead(1, 0) == 3 + 2 + 1
    assert queue.ahead(4, 0) == 3
    assert queue.ahead(4, 1) == 6


def test_removing_a_request_that_is_not_queued_fails() -> None:
    queue = FairQueue[int, Item](QUANTUM)
    queue.push(Item(1, 0, 1), 1, 0)
    for client, level in ((1, 0), (2, 0), (1, 1)):
        with pytest.raises(ValueError):
            queue.remove(Item(client, level, 1), client, level)
