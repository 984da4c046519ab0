"""The order of the waiting queue, compared with a list that is sorted each time."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import Request
from engine.scheduler.waiting_queue import WaitingQueue
from engine.sequence import Sequence
from pdserve.hashing import BlockHashes, root_hash
from pdserve.ipc.messages import Mode
from pdserve.rpc.protobuf import pack_tokens
from pdserve.sampling_params import SamplingParams


def sequence(number: int, priority: int) -> Sequence:
    request = Request(number, pack_tokens([1]), SamplingParams(max_tokens=1), Mode.LOCAL, "", priority)
    return Sequence(number, request, 0, array("I", [1]), BlockHashes(4, root_hash("")), 1, 2)


@given(
    st.lists(st.tuples(st.sampled_from(["append", "appendleft", "take", "remove"]), st.integers(-2, 2)), max_size=60)
)
def test_order_is_priority_then_deque_order(events: list[tuple[str, int]]) -> None:
    queue = WaitingQueue()
    model = list[Sequence]()
    for number, (event, value) in enumerate(events):
        if event.startswith("append"):
            new = sequence(number, value)
            getattr(queue, event)(new)
            model.insert(len(model) if event == "append" else 0, new)
            model.sort(key=lambda waiting: waiting.request.priority)
        elif model:
            gone = model.pop(0 if event == "take" else value % len(model))
            assert queue.head is gone or event == "remove"
            queue.remove(gone)
        assert len(queue) == len(model)
        assert queue.head is (model[0] if model else None)


def test_removing_a_sequence_that_is_not_queued_fails() -> None:
    queue = WaitingQueue()
    queue.append(sequence(1, 0))
    for priority in (0, 1):
        with pytest.raises(ValueError):
            queue.remove(sequence(2, priority))
