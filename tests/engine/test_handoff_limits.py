"""A handoff whose P answers in time is read to its end, however long the prompt and reading it take."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import accumulate, count
from math import inf

from hypothesis import example, given
from hypothesis import strategies as st

from decode_node.handoff import Ask, Event, Extended, Handoff, Phase
from engine.ipc.messages import ReadEnded, StartRead
from pdserve.pb import pdserve_pb2 as pb

Happening = tuple[float, int, Event]  # when, and a number that orders those of the same time


@given(
    lease=st.floats(0.01, 30.0),
    pauses=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=4),
    read=st.floats(0.0, 2.0),
    answer=st.floats(0.0, 0.9),
)
@example(lease=3.0, pauses=[0.89], read=0.05, answer=0.1)  # 30 ms before the limit
@example(lease=3.0, pauses=[0.8999], read=0.05, answer=0.1)  # 0.3 ms before it
@example(lease=3.0, pauses=[0.8], read=0.3, answer=0.9)
@example(lease=0.25, pauses=[0.5], read=1.0, answer=0.9)  # just before it would extend at once
def test_no_read_is_given_up(lease: float, pauses: list[float], read: float, answer: float) -> None:
    """A part comes after each of ``pauses``; these and a ``read`` are in lengths of a lease. P extends after a share
    ``answer`` of the time that it has for that.
    """
    handoff = Handoff(1, "epoch", "p", len(pauses), asked_at=0.0)
    handoff.sampled([7])
    numbers = count()
    happenings: list[Happening] = []
    for number, at in enumerate(accumulate(pauses), 1):
        part = pb.KVReady(lease=5, lease_ms=max(1, int(lease * 1000)), block_ids=[number], num_tokens=number)
        heappush(happenings, (at * lease, next(numbers), part))
    now, num_asked = 0.0, 0
    while handoff.phase is not Phase.CONFIRMING:
        event: Event = None
        if happenings and happenings[0][0] <= handoff.wake_at:
            now, _, event = heappop(happenings)
        else:
            now = max(now, handoff.wake_at)
        assert now < inf, "it waits for nothing, for ever"
        for action in handoff.on(event, now):
            if isinstance(action, StartRead):
                heappush(happenings, (now + read * lease, next(numbers), ReadEnded(1, "")))
            elif action is Ask.EXTEND:
                num_asked += 1
                answered_at = now + answer * min(0.1, lease / 5)
                heappush(happenings, (answered_at, next(numbers), Extended(now, lease)))
    assert num_asked <= 5 * now / lease, "it asks a few times per lease"
