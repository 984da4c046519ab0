"""A handoff with a responsive P is read to its end, for any duration of prompt and reads."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import accumulate, count
from math import inf

from hypothesis import example, given
from hypothesis import strategies as st

from node.reading.handoff import Event, Handoff, HandoffFailed, Phase
from pdserve.ipc.messages import ReadEnded, StartRead
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import Peer, ReadResult
from pdserve.rpc.timeouts import DEFAULT_TIMING

TimedEvent = tuple[float, int, Event]  # time, and a number that orders events of the same time


@given(
    lease_ms=st.integers(10, 30_000),
    pauses=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=4),
    read=st.floats(0.0, 2.0),
    answer=st.floats(0.0, 0.9),
)
@example(lease_ms=3000, pauses=[0.89], read=0.05, answer=0.1)  # 30 ms before the limit
@example(lease_ms=3000, pauses=[0.8999], read=0.05, answer=0.1)  # 0.3 ms before it
@example(lease_ms=3000, pauses=[0.8], read=0.3, answer=0.9)
@example(lease_ms=250, pauses=[0.5], read=1.0, answer=0.9)  # just before it would extend at once
def test_no_read_is_given_up_while_p_answers(lease_ms: int, pauses: list[float], read: float, answer: float) -> None:
    """A part follows each of ``pauses``; pauses and a ``read`` are in lengths of a lease.

    P answers each Extend after the share ``answer`` of the time that it has for that.
    """
    lease = lease_ms / 1000
    handoff = Handoff(1, 1, len(pauses), peer=Peer("p", "epoch", ()), timing=DEFAULT_TIMING, sent_at=0.0)
    handoff.add_first_tokens([7])
    numbers = count()
    events: list[TimedEvent] = []
    for number, at in enumerate(accumulate(pauses), 1):
        part = pb.KVReady(lease_ms=lease_ms, block_ids=[number], num_tokens=number)
        heappush(events, (at * lease, next(numbers), pb.PrefillEvent(kv_ready=part)))
    now = 0.0
    num_extends = 0
    while handoff.phase is not Phase.CONFIRMING:
        event: Event = None
        if events and events[0][0] <= handoff.wake_at:
            now, _, event = heappop(events)
        else:
            now = max(now, handoff.wake_at)
        assert now < inf, "it waits forever"
        for action in handoff.on(event, now):
            assert not isinstance(action, HandoffFailed), action.error
            if isinstance(action, StartRead):
                heappush(events, (now + read * lease, next(numbers), ReadEnded(1, "epoch", ReadResult(1))))
            elif isinstance(action, pb.ExtendRequest):
                num_extends += 1
                extended = pb.PrefillEvent(extended=pb.Extended(ask=action.ask, lease_ms=lease_ms))
                heappush(events, (now + answer * min(0.1, lease / 5), next(numbers), extended))
    assert num_extends <= 5 * now / lease, "it extends a few times per lease"
