"""One handoff between the real LeaseTable and Handoff, small enough to visit every order of events.

A prompt has two parts; a pull finds one of them. P overwrites blocks as soon as they are free. It may take the lease of
a pull back at any time. The network may reorder, lose and repeat Extend, Release and their answers, which is more than
one stream can do; P's other events keep their order. A hostile second stream, which knows the prompt's number, may send
Extend and Release at any time.
Every function that takes a State is a possible event.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import inf

from node.leasing.leases import Lease, LeaseId, LeaseTable
from node.reading.handoff import Action, Event, Handoff, HandoffFailed, Phase
from pdserve.errors import PeerError
from pdserve.ipc.messages import KVConfirmed, ReadEnded, StartRead
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import Peer, ReadResult
from pdserve.rpc.timeouts import PeerTiming

SECONDS = 2.0
GUARD = 1.0
TICK = 1.0
HORIZON = 4.0
PARTS = 2
LEASE = LeaseId(1, 1)  # lease of D's stream
HOSTILE = LeaseId(2, 1)  # lease that messages of the hostile stream name
OTHER = LeaseId(3, 1)  # lease of another D, in P's second epoch

# Events of P's stream besides numbers of parts.
FAILED = -1
ENDED = 0
FINISHED = PARTS + 1
REVOKED = PARTS + 2
PEER = Peer("p", "first", ())
TIMING = PeerTiming(2 * TICK)  # an Extend is answered within a tick, a Release within two

Message = tuple[str, int]  # to P: its kind, and the number of an extension
Answer = tuple[str, int, int]  # to D: its kind, the number of an extension, and milliseconds or whether the lease stood


@dataclass
class State:
    """``faults`` is how many may still happen; ``d_runs`` is false where D's clock stands still."""

    faults: int
    d_runs: bool
    make_table: Callable[[float, float], LeaseTable[Lease]] = LeaseTable
    pull: bool = False  # P has the first part cached, and no other
    due: float = inf  # D gives a pull up then
    revocable: bool = False  # P may lack blocks, and take the lease of a pull back
    make_handoff: Callable[..., Handoff] = Handoff
    now: float = 0.0
    epoch: str = "first"
    table: LeaseTable[Lease] = field(init=False)
    computed: int | None = None  # parts of the prompt on P; None: not requested there
    leased: frozenset[int] = frozenset()  # parts
    asked: bool = False  # P's engine lacks blocks, and waits for the end of the lease
    revoked: bool = False  # P has taken the lease back
    handoff: Handoff | None = field(init=False)  # None: the handoff is done
    open: bool = True  # D's stream to P
    lost: bool = False  # a message to P, or one side's state
    to_p: list[Message] = field(default_factory=lambda: [("prefill", 0)])
    to_d: list[Answer] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)  # events in flight: numbers of parts, FAILED, ENDED
    released: bool = False  # D has sent Release
    announced: frozenset[int] = frozenset()  # parts announced to D
    reads: frozenset[int] = frozenset()  # parts on their way to D
    tainted: bool = False  # D has read something else than P had computed

    def __post_init__(self) -> None:
        self.table = self.make_table(SECONDS, GUARD)
        self.handoff = self.make_handoff(
            1, 1, PARTS, peer=PEER, timing=TIMING, sent_at=0.0, pull=self.pull, due=self.due
        )

    @property
    def num_parts(self) -> int:
        """Parts that P announces."""
        return 1 if self.pull else PARTS

    @property
    def d_now(self) -> float:
        return self.now if self.d_runs else 0.0

    def freeze(self) -> bytes:
        """Return equal bytes for equivalent states."""
        self.to_p.sort()
        self.to_d.sort()
        if self.handoff is None:
            self.to_d = []
            self.stream = []
            self.announced = frozenset()
            self.tainted = False
        else:
            self.handoff._progress_at = 0.0  # the horizon is nearer than D's limit on stalls, and than P's on leases
        for entry in self.table._leases.values():
            entry.latest = inf
        self.table._heap = [(entry.ends, lease) for lease, entry in self.table._leases.items() if entry.granted]
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, 5)
        pickler.fast = True  # no references between equal parts
        pickler.dump(self)
        return buffer.getvalue()


# ---------------------------------------------------------------- P


def grants(s: State) -> bool:
    return any(lease.granted for lease in s.table)


def p_computes_a_part(s: State) -> None:
    assert s.computed is not None
    s.computed += 1
    if s.table.announce(LEASE, s.computed == s.num_parts, s.now):
        s.leased |= {s.computed}
        if s.open:
            s.stream.append(s.computed)
            if s.computed == s.num_parts:
                s.stream.append(FINISHED)
    if s.computed == s.num_parts:
        s.computed = None


def p_frees(s: State) -> None:
    if s.computed is not None:
        s.computed = None
        s.stream.append(FAILED)
    s.leased = frozenset()


def p_lacks_blocks(s: State) -> None:
    """P's engine asks for the lease of a pull. P's other side, which answers D, takes it back later."""
    s.asked = True


def p_takes_the_lease_back(s: State) -> None:
    if s.table.revoke(LEASE):
        s.revoked = True
        if s.open:
            s.stream.append(REVOKED)
        s.computed = None  # a pull that is not announced yet ends without another event
        p_frees(s)
    s.asked = False
    assert not s.leased, "P waits for blocks that stay leased"


def p_checks_its_clock(s: State) -> None:
    if s.table.expire(s.now) and s.epoch == "first":
        p_frees(s)


def p_receives(index: int, again: bool, s: State) -> None:
    kind, ask = s.to_p[index]
    if not again:
        del s.to_p[index]
    match kind:
        case "prefill" if s.epoch == "first":
            s.table.accept(Lease(LEASE))
            s.computed = 0
        case "prefill":
            s.stream.append(FAILED)
        case "close" if s.epoch == "first":
            s.to_p = [message for message in s.to_p if message[0] != "prefill"]
            s.computed = None
            if s.table.cancel(LEASE):
                p_frees(s)
        case "extend":
            s.to_d.append(("extended", ask, int(1000 * s.table.extend(LEASE, s.now))))
        case "release":
            stood, free = s.table.release(LEASE)
            if free:
                assert s.epoch == "first", "a lease was ended with that of an earlier epoch"
                p_frees(s)
            s.to_d.append(("released", 0, stood))


def p_restarts(s: State) -> None:
    """Another D's prompt gets the same number in the second epoch."""
    s.epoch = "second"
    s.lost = True
    s.table = s.make_table(SECONDS, GUARD)
    s.table.accept(Lease(OTHER))
    s.table.announce(OTHER, True, s.now)
    s.computed = None
    s.leased = frozenset()
    s.asked = False
    if s.open:
        s.stream.append(ENDED)


def hostile_releases(s: State) -> None:
    if s.table.release(HOSTILE)[1] and s.epoch == "first":
        p_frees(s)


def hostile_extends(s: State) -> None:
    assert not s.table.extend(HOSTILE, s.now), "another stream has extended the lease"


# ---------------------------------------------------------------- D


def d_decides(event: Event, s: State) -> None:
    if s.handoff is not None:
        d_acts(s.handoff.on(event, s.d_now), s)


def d_acts(actions: list[Action], s: State) -> None:
    handoff = s.handoff
    assert handoff is not None
    for action in actions:
        match action:
            case StartRead():
                assert s.d_now < handoff.limit, "D begins a read after its limit"
                s.reads |= {action.num_tokens}
            case pb.ExtendRequest():
                s.to_p.append(("extend", action.ask))
            case pb.ReleaseRequest():
                assert not s.released, "D sends Release twice"
                s.released = True
                s.to_p.append(("release", 0))
            case KVConfirmed():
                assert not s.tainted, "D uses KV that P has not computed"
                assert s.announced == frozenset(range(1, s.num_parts + 1))
                assert action.num_tokens == s.num_parts
                assert not s.reads
            case HandoffFailed():
                s.reads = frozenset()  # later bytes land in quarantine
    if not handoff.active:
        s.handoff = None


def d_gives_up(s: State) -> None:
    """The client leaves. Later bytes land in quarantine."""
    assert s.handoff is not None
    s.reads = frozenset()
    d_acts(s.handoff.give_up(), s)


def d_receives(s: State) -> None:
    event = s.stream.pop(0)
    if event == ENDED:
        s.open = False
        d_decides(PeerError("the stream has ended"), s)
    elif event == FAILED:
        d_decides(pb.PrefillEvent(failed=pb.Failure(message="the lease has ended")), s)
    elif event == REVOKED:
        d_decides(pb.PrefillEvent(released=pb.Released(revoked=True)), s)
    elif event == FINISHED:
        d_decides(pb.PrefillEvent(finished=pb.Finished()), s)
    else:
        s.announced |= {event}
        if event == PARTS and s.handoff is not None:
            s.handoff.add_first_tokens([5])
        ready = pb.KVReady(lease_ms=int(SECONDS * 1000), block_ids=[event], num_tokens=event)
        d_decides(pb.PrefillEvent(kv_ready=ready), s)


def d_receives_answer(index: int, s: State) -> None:
    kind, ask, value = s.to_d.pop(index)
    if kind == "extended":
        d_decides(pb.PrefillEvent(extended=pb.Extended(ask=ask, lease_ms=value)), s)
    else:
        d_decides(pb.PrefillEvent(released=pb.Released(stood=bool(value))), s)


def read_ends(part: int, s: State) -> None:
    s.reads -= {part}
    s.tainted |= part not in s.leased
    d_decides(ReadEnded(1, "first", ReadResult(1)), s)


def read_fails(part: int, s: State) -> None:
    s.reads -= {part}
    d_decides(ReadEnded(1, "first", ReadResult(1, "broken")), s)


def d_checks_its_clock(s: State) -> None:
    d_decides(None, s)
    assert s.handoff is None or s.d_now < s.handoff.limit or not s.reads, "D keeps reading after its limit"


def d_restarts(s: State) -> None:
    s.handoff = None
    s.reads = frozenset()
    s.to_d = []
    s.stream = []
    s.to_p.append(("close", 0))
    s.open = False
    s.lost = True


# ---------------------------------------------------------------- time and network


def time_passes(s: State) -> None:
    s.now += TICK


def stream_breaks(s: State) -> None:
    """P notices at any later time."""
    s.stream = [ENDED]
    s.lost = True
    s.to_p.append(("close", 0))


def request_is_lost(index: int, s: State) -> None:
    s.lost = True
    kind, _ = s.to_p.pop(index)
    if kind == "prefill":
        s.stream.append(ENDED)


def answer_is_lost(index: int, s: State) -> None:
    s.to_d.pop(index)


# ---------------------------------------------------------------- search


def moves(s: State) -> Iterator[Callable[[State], None]]:
    """Yield the possible next events without faults."""
    if s.computed is not None:
        yield p_computes_a_part
    if s.asked:
        yield p_takes_the_lease_back
    elif s.revocable and s.table.get(LEASE) is not None:
        yield p_lacks_blocks
    if grants(s):  # P may check its clock at any time
        yield p_checks_its_clock
    if len(s.table._leases):
        yield hostile_releases
        yield hostile_extends
    if s.handoff is not None and s.handoff.wake_at <= s.d_now:
        yield d_checks_its_clock
    if s.stream:
        yield d_receives
    for index, (kind, _) in enumerate(s.to_p):
        if kind in ("prefill", "close") or ("prefill", 0) not in s.to_p:  # one stream: no message overtakes its prompt
            yield partial(p_receives, index, False)
    for index in range(len(s.to_d)):
        yield partial(d_receives_answer, index)
    if s.epoch == "first":
        yield from (partial(read_ends, part) for part in s.reads)
    if s.now < HORIZON:
        yield time_passes


def faults(s: State) -> Iterator[Callable[[State], None]]:
    if s.epoch == "first":
        yield p_restarts
    if s.handoff is not None:
        yield d_gives_up
        yield d_restarts
    if s.open:
        yield stream_breaks
    yield from (partial(read_fails, part) for part in s.reads)
    for index, (kind, _) in enumerate(s.to_p):
        if kind in ("extend", "release") and ("prefill", 0) not in s.to_p:
            yield partial(p_receives, index, True)
        if kind != "close":  # P notices the end of the stream sooner or later
            yield partial(request_is_lost, index)
    yield from (partial(answer_is_lost, index) for index in range(len(s.to_d)))


def check(s: State) -> None:
    """Assert the invariants of every state."""
    if s.handoff is None and not (s.lost or s.to_p or s.computed is not None):
        assert not s.leased, "D is done, every message to P has arrived, and P still leases blocks"
    if s.epoch == "first":
        assert bool(s.leased) == grants(s), "blocks are leased without a lease, or the other way round"
        handoff = s.handoff
        reading = handoff is not None and handoff.phase is Phase.READING and s.d_now < handoff.limit
        if s.d_runs and reading and not s.revoked:
            assert s.announced <= s.leased, "P freed blocks that D may read"
        if handoff is not None and not (s.to_p or s.to_d or s.stream or s.reads or s.computed is not None):
            assert handoff.wake_at < inf, "D waits forever"
