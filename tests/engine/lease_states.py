"""One handoff between LeaseTable and Handoff as they are, small enough that every order of events can be visited.

A prompt of two parts. P fills blocks with something else as soon as they are free. D does not hear twice of what gRPC
brings once: only unary requests are repeated. Every function that takes a State is something that can happen.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import inf

from decode_node.handoff import Ask, Event, Extended, Handoff, Phase, Released
from engine.ipc.messages import KVConfirmed, ReadEnded, StartRead
from pdserve.errors import PdserveError, PeerError
from pdserve.pb import pdserve_pb2 as pb
from prefill_node.leases import LeaseTable

SECONDS, GUARD, TICK, HORIZON = 2.0, 1.0, 1.0, 4.0
LEASE, PARTS = 1, 2
ALL = frozenset(range(1, PARTS + 1))

Message = tuple[str, str, float]  # to P: epoch, what, when D sent it


@dataclass
class State:
    """``faults`` is how many may still happen; ``d_runs`` is false where D's clock stands still."""

    faults: int
    d_runs: bool
    now: float = 0.0
    epoch: str = "first"
    table: LeaseTable = field(default_factory=lambda: LeaseTable("first", SECONDS, GUARD, remember=1))
    computed: int | None = None  # parts of the prompt on P; None: nobody wants it there
    leased: frozenset[int] = frozenset()  # parts
    handoff: Handoff | None = field(default_factory=lambda: Handoff(1, "first", "p", PARTS, 0.0))  # None: it is over
    called: bool = True  # D's call is open
    to_p: list[Message] = field(default_factory=lambda: [("first", "prefill", 0.0)])
    to_d: list[Extended | Released | None] = field(default_factory=list)  # None: there is no answer to a release
    stream: list[int] = field(default_factory=list)  # parts on their way; 0: the call has ended
    told: frozenset[int] = frozenset()  # parts that D has heard of
    reads: frozenset[int] = frozenset()  # parts on their way to D
    tainted: bool = False  # D has read something else than P had computed

    @property
    def d_now(self) -> float:
        return self.now if self.d_runs else 0.0

    def freeze(self) -> bytes:
        """States that differ in nothing which matters have equal bytes."""
        self.to_p.sort()
        if self.handoff is None:
            self.to_d, self.stream, self.told, self.tainted = [], [], frozenset(), False
        else:
            self.handoff._progress = 0.0  # the horizon is nearer than D's patience, and than P's
        for lease in self.table._leases.values():
            lease.latest = inf
        self.table._heap = [(lease.ends, LEASE) for lease in self.table._leases.values() if lease.granted]
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, 5)
        pickler.fast = True  # no references between equal parts
        pickler.dump(self)
        return buffer.getvalue()


# ---------------------------------------------------------------- P


def p_computes(s: State) -> None:
    assert s.computed is not None
    s.computed += 1
    if s.table.announce(LEASE, s.computed == PARTS, s.now):
        s.leased |= {s.computed}
        if s.called:
            s.stream.append(s.computed)
    if s.computed == PARTS:
        s.computed = None


def p_frees(s: State) -> None:
    if s.computed is not None:
        s.computed = None
        s.stream.append(0)
    s.leased = frozenset()


def p_looks(s: State) -> None:
    if s.table.expire(s.now) and s.epoch == "first":
        p_frees(s)


def p_hears(index: int, again: bool, s: State) -> None:
    epoch, what, asked_at = s.to_p[index]
    if not again:
        del s.to_p[index]
    match what:
        case "prefill" if epoch == s.epoch:
            s.table.accept(LEASE)
            s.computed = 0
        case "prefill":
            s.stream.append(0)
        case "hang up" if epoch == s.epoch:
            s.to_p = [message for message in s.to_p if message[1] != "prefill"]
            s.computed = None
            if s.table.hang_up(LEASE):
                p_frees(s)
        case Ask.EXTEND.value:
            s.to_d.append(Extended(asked_at, s.table.extend(epoch, LEASE, s.now)))
        case Ask.RELEASE.value:
            kept, free = s.table.release(epoch, LEASE)
            if free:
                assert s.epoch == epoch, "a lease was ended with that of an earlier life"
                p_frees(s)
            s.to_d.append(Released(kept))


def p_restarts(s: State) -> None:
    """Somebody else's lease gets the same number in its second life."""
    s.epoch = "second"
    s.table = LeaseTable("second", SECONDS, GUARD, remember=1)
    s.table.accept(LEASE)
    s.table.announce(LEASE, True, s.now)
    s.computed, s.leased = None, frozenset()
    if s.called:
        s.stream.append(0)


# ---------------------------------------------------------------- D


def d_decides(event: Event, s: State) -> None:
    handoff = s.handoff
    if handoff is None:
        return
    try:
        actions = handoff.on(event, s.d_now)
    except PdserveError:
        d_gives_up(s)
        return
    for action in actions:
        match action:
            case StartRead():
                assert s.d_now < handoff.limit, "D begins a read after its limit"
                s.reads |= {action.num_tokens}
            case Ask():
                s.to_p.append(("first", action.value, s.d_now))
            case KVConfirmed():
                assert not s.tainted, "D uses what P has not computed"
                assert s.told == ALL
                assert not s.reads
                s.handoff = None


def d_gives_up(s: State) -> None:
    """Also when its client leaves. What still lands is in quarantine."""
    s.handoff, s.reads, s.called = None, frozenset(), False
    s.to_p += [("first", "hang up", s.d_now), ("first", Ask.RELEASE.value, s.d_now)]


def d_hears(s: State) -> None:
    part = s.stream.pop(0)
    if part == 0:
        s.called = False
        d_decides(PeerError("the call has ended"), s)
        return
    s.told |= {part}
    if part == PARTS and s.handoff is not None:
        s.handoff.sampled([5])
    d_decides(pb.KVReady(lease=LEASE, lease_ms=int(SECONDS * 1000), block_ids=[part], num_tokens=part), s)


def d_hears_answer(index: int, s: State) -> None:
    event = s.to_d.pop(index)
    if event is not None:
        d_decides(event, s)
    elif s.handoff is not None:
        d_gives_up(s)


def d_has_read(part: int, s: State) -> None:
    s.reads -= {part}
    s.tainted |= part not in s.leased
    d_decides(ReadEnded(1, ""), s)


def d_fails_to_read(part: int, s: State) -> None:
    s.reads -= {part}
    d_decides(ReadEnded(1, "broken"), s)


def d_looks(s: State) -> None:
    d_decides(None, s)
    assert s.handoff is None or s.d_now < s.handoff.limit or not s.reads, "D goes on reading after its limit"


def d_restarts(s: State) -> None:
    s.handoff, s.reads, s.to_d, s.stream = None, frozenset(), [], []
    s.to_p.append(("first", "hang up", s.d_now))
    s.called = False


# ---------------------------------------------------------------- time and network


def time_passes(s: State) -> None:
    s.now += TICK


def call_breaks(s: State) -> None:
    """P hears of it when it hears of it."""
    s.stream = [0]
    s.to_p.append(("first", "hang up", s.d_now))


def request_is_lost(index: int, s: State) -> None:
    _, what, asked_at = s.to_p.pop(index)
    if what == "prefill":
        s.stream.append(0)
    else:
        no_answer(what == Ask.EXTEND.value, asked_at, s)


def answer_is_lost(index: int, s: State) -> None:
    answer = s.to_d.pop(index)
    extended = isinstance(answer, Extended)
    no_answer(extended, answer.asked_at if isinstance(answer, Extended) else 0.0, s)


def no_answer(extended: bool, asked_at: float, s: State) -> None:
    s.to_d.append(Extended(asked_at, 0.0, PeerError("no answer")) if extended else None)


# ---------------------------------------------------------------- what there is to search


def moves(s: State) -> Iterator[Callable[[State], None]]:
    """What can happen next, without faults."""
    if s.computed is not None:
        yield p_computes
    when = s.table.next_expiry()
    if when is not None and when <= s.now:
        yield p_looks
    if s.handoff is not None and s.handoff.wake_at <= s.d_now:
        yield d_looks
    if s.stream:
        yield d_hears
    for index in range(len(s.to_p)):
        yield partial(p_hears, index, False)
    for index in range(len(s.to_d)):
        yield partial(d_hears_answer, index)
    if s.epoch == "first":
        yield from (partial(d_has_read, part) for part in s.reads)
    if s.now < HORIZON:
        yield time_passes


def faults(s: State) -> Iterator[Callable[[State], None]]:
    if s.epoch == "first":
        yield p_restarts
    if s.handoff is not None:
        yield d_gives_up
        yield d_restarts
    if s.called:
        yield call_breaks
    yield from (partial(d_fails_to_read, part) for part in s.reads)
    for index, (_, what, _) in enumerate(s.to_p):
        if what in (Ask.EXTEND.value, Ask.RELEASE.value):
            yield partial(p_hears, index, True)
        if what != "hang up":  # P notices sooner or later
            yield partial(request_is_lost, index)
    yield from (partial(answer_is_lost, index) for index in range(len(s.to_d)))


def check(s: State) -> None:
    """What must hold in every state."""
    if s.epoch == "first":
        assert bool(s.leased) == bool(len(s.table)), "blocks are leased without a lease, or the other way round"
        handoff = s.handoff
        if s.d_runs and handoff is not None and handoff.phase is Phase.READING and s.d_now < handoff.limit:
            assert s.told <= s.leased, "P took blocks back that D may read"
        if handoff is not None and not (s.to_p or s.to_d or s.stream or s.reads or s.computed is not None):
            assert handoff.wake_at < inf, "D waits for nothing, for ever"
