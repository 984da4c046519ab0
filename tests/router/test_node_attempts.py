"""Attempts at nodes: limited in number and time, ever farther apart, and not at nodes that were just left."""

from __future__ import annotations

import pytest

from pdserve.errors import EngineCrashed, NodeError
from router.errors import MalformedOutput
from router.fleet import node_attempts
from router.fleet.node_attempts import AvoidedNodes, NodeAttempts, failure_reason
from router.fleet.serve_stream import NodeLost


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(node_attempts, "monotonic", clock)
    return clock


def test_pauses_double_up_to_the_longest_and_begin_again() -> None:
    attempts = NodeAttempts(2, AvoidedNodes())
    attempts.begin()
    assert [attempts.next_pause() for _ in range(7)] == [0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5]
    attempts.allow_more_time()
    assert attempts.next_pause() == 0.5
    attempts.begin()
    assert [attempts.next_pause(0.05) for _ in range(4)] == [0.02, 0.04, 0.05, 0.05]


def test_time_begins_when_the_work_leaves_a_node(clock: Clock) -> None:
    attempts = NodeAttempts(2, AvoidedNodes())
    clock.now += 11.0
    assert not attempts.begun
    assert not attempts.expired
    attempts.begin()
    clock.now += 9.9
    assert attempts.begun
    assert not attempts.expired
    clock.now += 0.2
    assert attempts.expired
    attempts.allow_more_time()
    assert not attempts.expired


def test_failures_are_limited_with_those_before() -> None:
    assert [NodeAttempts(2, AvoidedNodes(), before).count_failure() for before in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    attempts = NodeAttempts(1, AvoidedNodes())
    assert [attempts.count_failure(), attempts.count_failure()] == [True, False]
    assert attempts.num_failures == 2


def test_each_node_is_avoided_for_two_seconds(clock: Clock) -> None:
    avoided = AvoidedNodes()
    avoided.add("a")
    clock.now += 1.5
    avoided.add("b")
    assert avoided.ids == ["a", "b"]
    clock.now += 1.0
    assert avoided.ids == ["b"]
    assert "b" in avoided
    assert "a" not in avoided
    clock.now += 1.0
    assert not avoided.ids


def test_reasons_are_labels_of_metrics() -> None:
    errors = (EngineCrashed("x"), NodeLost("x"), MalformedOutput("field", "x"), NodeError("x"))
    assert [failure_reason(error) for error in errors] == ["crashed", "lost", "malformed", "failed"]
