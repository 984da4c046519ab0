"""P gets back what it holds for a handoff, and no read is used that P has not confirmed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from node.reading.handoff import Action, Event, Handoff, HandoffFailed, Phase
from pdserve.errors import Draining, PeerError
from pdserve.ipc.messages import KVConfirmed, ReadChecked, ReadEnded, StartRead
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import Peer, ReadResult
from pdserve.rpc.timeouts import PeerTiming

PEER = Peer("p", "epoch", ())
TIMING = PeerTiming(4.0)
RELEASE = pb.ReleaseRequest(request=9)
ACCEPTED = pb.PrefillEvent(request=9, accepted=pb.Accepted())
STOOD, ENDED_EARLY = (pb.PrefillEvent(request=9, released=pb.Released(stood=stood)) for stood in (True, False))
DRAINING = pb.PrefillEvent(request=9, failed=pb.Failure(code=pb.Failure.DRAINING))


GOOD = ReadChecked(1, "epoch", 0, "")
CORRUPT = ReadChecked(1, "epoch", 1, "block 0 differs")


def part(num_tokens: int, digests: Sequence[int] = ()) -> pb.PrefillEvent:
    ready = pb.KVReady(lease_ms=3000, block_ids=[num_tokens], num_tokens=num_tokens, digests=digests)
    return pb.PrefillEvent(request=9, kv_ready=ready)


def waiting() -> Handoff:
    """A prompt of two tokens, in blocks of one, that was sent at time 0."""
    return Handoff(1, 9, 2, peer=PEER, timing=TIMING, sent_at=0.0)


def confirming(digests: Sequence[int] = ()) -> Handoff:
    handoff = waiting()
    handoff.on(ACCEPTED, 0.1)
    handoff.add_first_tokens([7])
    assert [type(action) for action in handoff.on(part(2, digests=digests), 0.2)] == [StartRead]
    assert handoff.on(ReadEnded(1, "epoch", ReadResult(1)), 0.3) == [RELEASE]
    return handoff


@pytest.mark.parametrize("order", [(GOOD, STOOD), (STOOD, GOOD)], ids=["checked first", "stood first"])
def test_kv_is_confirmed_once_its_lease_stood_and_its_digests_are_equal(order: tuple[Event, Event]) -> None:
    handoff = confirming(digests=[1])
    assert handoff.on(order[0], 0.4) == []
    assert handoff.active
    assert handoff.on(order[1], 0.5) == [KVConfirmed(1, 2, ((7,),))]
    assert not handoff.active


@pytest.mark.parametrize("before", [(), (STOOD,)], ids=["unconfirmed", "confirmed"])
def test_corrupt_kv_is_given_up_also_after_its_lease_stood(before: tuple[Event, ...]) -> None:
    handoff = confirming(digests=[1])
    for event in before:
        assert handoff.on(event, 0.4) == []
    assert "block 0 differs" in str(failure(handoff.on(CORRUPT, 0.5)))
    assert handoff.phase is Phase.GIVEN_UP


def test_the_end_of_the_stream_means_nothing_once_the_lease_stood() -> None:
    handoff = confirming(digests=[1])
    handoff.on(STOOD, 0.4)
    assert handoff.on(PeerError("the stream ended"), 0.5) == []
    assert handoff.on(GOOD, 0.6) == [KVConfirmed(1, 2, ((7,),))]


def failure(actions: list[Action]) -> Exception:
    assert isinstance(actions[-1], HandoffFailed)
    return actions[-1].error


@pytest.mark.parametrize("before", [[], [ACCEPTED], [ACCEPTED, part(1)]])
def test_giving_up_at_any_time_releases_once(before: list[pb.PrefillEvent]) -> None:
    handoff = waiting()
    for event in before:
        handoff.on(event, 0.1)
    assert handoff.give_up() == [RELEASE]
    assert not handoff.active
    assert handoff.on(part(2), 0.2) == handoff.give_up() == []


def test_a_prompt_that_p_refuses_needs_no_message() -> None:
    handoff = waiting()
    actions = handoff.on(DRAINING, 0.1)
    assert isinstance(failure(actions), Draining)
    assert len(actions) == 1


def test_a_prompt_that_p_fails_after_a_part_is_released() -> None:
    handoff = waiting()
    handoff.on(part(1), 0.1)
    assert handoff.on(DRAINING, 0.2)[:-1] == [RELEASE]


def test_the_end_of_the_stream_gives_the_lease_back() -> None:
    """The message arrives where D itself ends the stream."""
    handoff = waiting()
    error = PeerError("the stream ended")
    assert handoff.on(error, 0.2) == [RELEASE, HandoffFailed(error)]


def test_a_part_after_the_last_one_is_refused() -> None:
    handoff = waiting()
    handoff.add_first_tokens([7])
    handoff.on(part(2), 0.1)
    actions = handoff.on(part(3), 0.2)
    assert actions[:-1] == [RELEASE]
    assert "after the last ones" in str(failure(actions))


def test_released_before_the_release_is_ignored() -> None:
    handoff = waiting()
    handoff.add_first_tokens([7])
    handoff.on(part(2), 0.1)
    assert handoff.on(STOOD, 0.2) == []
    assert handoff.phase is Phase.READING


def test_kv_is_confirmed_by_a_lease_that_stood() -> None:
    handoff = confirming()
    assert handoff.on(STOOD, 0.4) == [KVConfirmed(1, 2, ((7,),))]
    assert not handoff.active


def test_a_lease_that_ended_early_confirms_nothing() -> None:
    handoff = confirming()
    actions = handoff.on(ENDED_EARLY, 0.4)
    assert "ended before its blocks had been read" in str(failure(actions))
    assert len(actions) == 1, "the lease has been released already"
    assert handoff.on(STOOD, 0.5) == []


def test_an_unanswered_release_gives_up_at_its_timeout() -> None:
    handoff = confirming()
    assert handoff.wake_at == 0.3 + TIMING.timeout
    assert handoff.on(None, handoff.wake_at - 0.01) == []
    actions = handoff.on(None, handoff.wake_at)
    assert "did not answer" in str(failure(actions))
    assert len(actions) == 1, "the lease has been released already"
    assert handoff.on(STOOD, 5.0) == []


def test_an_unanswered_extend_is_repeated_before_the_limit_and_gives_up_after_it() -> None:
    handoff = waiting()
    handoff.add_first_tokens([7])
    handoff.on(part(1), 0.0)
    handoff.on(ReadEnded(1, "epoch", ReadResult(1)), 0.1)
    limit = handoff.limit
    asks = []
    now = 0.0
    while handoff.active:
        now = handoff.wake_at
        actions = handoff.on(None, now)
        asks += [action.ask for action in actions if isinstance(action, pb.ExtendRequest)]
    assert asks == [1]
    assert now == 0.9 + TIMING.answer_timeout > limit
    assert actions[0] == RELEASE


def test_a_late_answer_to_an_earlier_extend_does_not_move_the_limit() -> None:
    handoff = Handoff(1, 9, 2, peer=PEER, timing=PeerTiming(1.0), sent_at=0.0)
    handoff.on(part(1), 0.0)
    (first,) = handoff.on(None, handoff.wake_at)
    assert handoff.on(None, handoff.wake_at) == [], "the answer is due"
    (second,) = handoff.on(None, handoff.wake_at)
    assert isinstance(first, pb.ExtendRequest)
    assert isinstance(second, pb.ExtendRequest)
    limit = handoff.limit
    handoff.on(pb.PrefillEvent(extended=pb.Extended(ask=first.ask, lease_ms=3000)), 1.9)
    assert handoff.limit == limit
    handoff.on(pb.PrefillEvent(extended=pb.Extended(ask=second.ask, lease_ms=3000)), 2.0)
    assert handoff.limit > limit


FINISHED = pb.PrefillEvent(request=9, finished=pb.Finished())


def pulling() -> Handoff:
    """Like ``waiting``, but a pull."""
    return Handoff(1, 9, 2, peer=PEER, timing=TIMING, sent_at=0.0, pull=True)


@pytest.mark.parametrize("cached", [1, 2])
@pytest.mark.parametrize("late", [False, True], ids=["", "finished late"])
def test_pull_is_confirmed_with_the_tokens_that_p_has(cached: int, late: bool) -> None:
    handoff = pulling()
    read = ReadEnded(1, "epoch", ReadResult(1))
    assert [type(action) for action in handoff.on(part(cached), 0.1)] == [StartRead]
    events: list[Event] = [read, FINISHED] if late else [FINISHED, read]
    assert [action for event in events for action in handoff.on(event, 0.2)] == [RELEASE]
    assert handoff.on(STOOD, 0.3) == [KVConfirmed(1, cached, ())]


def test_pull_of_nothing_has_nothing_to_release_or_confirm() -> None:
    handoff = pulling()
    handoff.on(ACCEPTED, 0.1)
    assert handoff.on(FINISHED, 0.2) == [KVConfirmed(1, 0, ())]
    assert not handoff.active


@pytest.mark.parametrize(
    "tokens",
    [pb.PrefillEvent(first_tokens=pb.FirstTokens()), pb.PrefillEvent(next_token=pb.SampledToken())],
    ids=["first", "next"],
)
def test_pull_with_tokens_is_given_up(tokens: pb.PrefillEvent) -> None:
    handoff = pulling()
    handoff.on(part(1), 0.1)
    actions = handoff.on(tokens, 0.2)
    assert actions[:-1] == [RELEASE]
    assert "sent tokens of a pull" in str(failure(actions))


def test_pull_with_parts_after_its_end_is_refused() -> None:
    handoff = pulling()
    handoff.on(part(1), 0.1)
    handoff.on(FINISHED, 0.1)
    actions = handoff.on(part(2), 0.2)
    assert actions[:-1] == [RELEASE]
    assert "after the last ones" in str(failure(actions))


def test_only_a_pull_may_end_early() -> None:
    handoff = waiting()
    handoff.on(part(1), 0.1)
    actions = handoff.on(FINISHED, 0.2)
    assert actions[:-1] == [RELEASE]
    assert "without leasing its blocks" in str(failure(actions))
