"""P and D around what decides about a handoff: their fronts in a few lines, their real engines with a toy model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from slow_connector import SlowConnector
from toy import ToyRunner, reference
from toy_node import BLOCK, Node

from decode_node.handoff import Ask, Event, Extended, Handoff, Phase, Released
from engine.ipc.messages import (
    Cancel,
    Connect,
    Disconnect,
    FreeLease,
    Leased,
    Mode,
    PrefillLocally,
    ReadEnded,
    StartRead,
)
from pdserve.errors import PdserveError, PeerError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import Peer, SamplingParams
from prefill_node.leases import LeaseTable

SECONDS, GUARD = 3.0, 1.0
P_BLOCKS, D_BLOCKS = 14, 12
AHEAD = 2  # tokens after the first
Tokens = tuple[int, ...]  # of the only choice: at first one, then those that P brings beside the handoff
Said = pb.KVReady | pb.Accepted | Tokens | PdserveError  # on a call, to D


@dataclass
class Call:
    """A prompt asked of P. Here each may break off by itself; on a stream all do at once. D knows epoch and lease."""

    rid: int  # on D
    epoch: str
    prompt: list[int]
    max_tokens: int
    skip: int
    lease: int | None = None
    open: bool = True  # to D
    wanted: bool = True  # by D: else it only waits to learn what to release
    events: deque[Said] = field(default_factory=deque)


@dataclass(frozen=True)
class Request:
    """On its way to P. ``sent_at`` is by D's clock."""

    kind: str  # prefill, hang up, extend, release
    call: Call
    sent_at: float


@dataclass(frozen=True)
class Reply:
    """On its way to D."""

    call: Call
    event: Extended | Released | PdserveError


class PrefillSide:
    """What P's front does, around its LeaseTable; and P's engine."""

    def __init__(self, depth: tuple[int, int]) -> None:
        self.node = Node(P_BLOCKS, *depth)
        self.table = LeaseTable(self.node.epoch, SECONDS, GUARD)
        self._numbers = count(1)
        self._calls: dict[int, Call] = {}  # by lease, that have not ended
        self._samples: dict[int, Tokens] = {}
        self._computing: set[int] = set()  # leases whose last blocks have not been announced

    @property
    def epoch(self) -> str:
        return self.node.epoch

    def prefill(self, call: Call) -> None:
        lease = next(self._numbers)
        self.table.accept(lease)
        self._calls[lease] = call
        self._samples[lease] = ()
        self._computing.add(lease)
        sampling = SamplingParams(max_tokens=call.max_tokens)
        self.node.submit(lease, call.prompt, sampling, Mode.LEASE, call.skip, ahead=AHEAD)
        call.events.append(pb.Accepted(lease=lease))

    def release(self, epoch: str, lease: int) -> bool:
        kept, free = self.table.release(epoch, lease)
        if free:
            self._free(lease)
        return kept

    def hang_up(self, call: Call) -> None:
        for lease in [lease for lease, mine in self._calls.items() if mine is call]:
            del self._calls[lease]
            self.node.obey(Cancel(lease))
            if self.table.hang_up(lease):
                self._free(lease)

    def expire(self, now: float) -> None:
        for lease in self.table.expire(now):
            self._free(lease)

    def turn(self, now: float) -> None:
        batch = self.node.turn()
        for output in batch.outputs:
            tokens = () if output.sample is None else (output.sample.token_id,)
            if output.rid in self._computing:
                self._samples[output.rid] += tokens
            elif tokens and (call := self._calls.get(output.rid)) is not None:
                call.events.append(tokens)
        for leased in batch.leased:
            self._announce(leased, now)

    def _announce(self, leased: Leased, now: float) -> None:
        lease, samples = leased.rid, self._samples[leased.rid]
        if not self.table.announce(lease, bool(samples), now):
            return
        if samples:
            self._computing.discard(lease)
        call = self._calls.get(lease)
        if call is not None:
            if samples:
                call.events.append(samples)
            call.events.append(
                pb.KVReady(
                    lease=lease,
                    lease_ms=int(SECONDS * 1000),
                    block_ids=leased.block_ids,
                    num_tokens=leased.num_tokens,
                )
            )

    def _free(self, lease: int) -> None:
        call = self._calls.pop(lease, None)
        if lease in self._computing:
            self._computing.discard(lease)
            if call is not None:
                call.events.append(PeerError("the lease has ended"))
        self.node.obey(FreeLease(lease))


@dataclass
class Attempt:
    handoff: Handoff
    call: Call
    announced: list[tuple[int, int]] = field(default_factory=list)  # (P's block, its first token)
    num_reads: int = 0  # under way


class DecodeSide:
    """What D's front does, around its Handoffs; and D's engine. ``outbox`` is what it sends to P."""

    def __init__(self, depth: tuple[int, int], memory_of: Callable[[str], ToyRunner | None]) -> None:
        self.connector = SlowConnector("d", memory_of)
        self.node = Node(D_BLOCKS, *depth, connector=self.connector)
        self.connector.runner = self.node.runner
        self.peer = ""  # epoch of it that we are connected to
        self.prompts: dict[int, list[int]] = {}
        self.wanted: dict[int, SamplingParams] = {}  # requests that have not been cancelled
        self.attempts: dict[int, Attempt] = {}  # under way
        self.outbox: list[Request] = []
        self._rids = count(1)

    def submit(self, prompt: list[int], max_tokens: int) -> None:
        rid = next(self._rids)
        self.prompts[rid], self.wanted[rid] = prompt, SamplingParams(max_tokens=max_tokens)
        self.node.submit(rid, prompt, self.wanted[rid], Mode.HANDOFF)

    def connect(self, p: PrefillSide) -> None:
        if self.peer:
            self.node.obey(Disconnect(self.peer))
        self.peer = p.epoch
        self.node.obey(Connect(Peer("p", p.epoch, (p.node.kv,))))

    def cancel(self, rid: int, now: float) -> None:
        self.node.obey(Cancel(rid))
        del self.wanted[rid]
        attempt = self.attempts.pop(rid, None)
        if attempt is not None:
            self._give_back(attempt.call, now)

    def turn(self, now: float) -> None:
        batch = self.node.turn()
        for reserved in batch.reserved:
            if reserved.rid in self.wanted:
                self._start(reserved.rid, reserved.cached_tokens, now)
        for read in batch.reads:
            if read.rid in self.attempts:
                self.on(self.attempts[read.rid], read, now)
        for rid, params in self.wanted.items():
            tokens = self.node.tokens[rid, 0]
            assert tokens == reference(self.prompts[rid], 0, params.max_tokens)[: len(tokens)], "a wrong token"

    def hear(self, call: Call, event: Said, now: float) -> None:
        """The next event of a call."""
        if isinstance(event, PdserveError):
            call.open = False
        if isinstance(event, pb.Accepted):
            call.lease = event.lease
            if not call.wanted:
                self._give_back(call, now)
        attempt = self._attempt(call)
        if attempt is None or isinstance(event, pb.Accepted):
            return
        if isinstance(event, tuple):
            self._pass_on(attempt, event, now)
            return
        if isinstance(event, pb.KVReady):
            start = call.skip // BLOCK + len(attempt.announced)
            attempt.announced += [(block, BLOCK * (start + i)) for i, block in enumerate(event.block_ids)]
        self.on(attempt, event, now)

    def hear_reply(self, reply: Reply, now: float) -> None:
        attempt = self._attempt(reply.call)
        if attempt is None:
            return
        if isinstance(reply.event, PdserveError):  # no answer to a release
            self._give_up(attempt, now)
        else:
            self.on(attempt, reply.event, now)

    def on(self, attempt: Attempt, event: Event, now: float) -> None:
        """Let the handoff decide, and do it."""
        attempt.num_reads -= isinstance(event, ReadEnded)
        try:
            actions = attempt.handoff.on(event, now)
        except PdserveError:
            self._give_up(attempt, now)
            return
        for action in actions:
            if isinstance(action, StartRead):
                assert now < attempt.handoff.limit, "D begins a read after its limit"
                attempt.num_reads += 1
            if isinstance(action, Ask):
                self.outbox.append(Request(action.value, attempt.call, now))
            else:
                self.node.obey(action)
        if attempt.handoff.phase is Phase.CONFIRMED:
            del self.attempts[attempt.call.rid]

    def tick(self, now: float) -> None:
        for attempt in list(self.attempts.values()):
            if attempt.handoff.wake_at <= now:
                self.on(attempt, None, now)
        for attempt in self.attempts.values():
            assert now < attempt.handoff.limit or not attempt.num_reads, "D goes on reading after its limit"

    def _pass_on(self, attempt: Attempt, tokens: Tokens, now: float) -> None:
        handoff, call = attempt.handoff, attempt.call
        if handoff.outputs:
            (token,) = tokens
            handoff.went_ahead(token, call.max_tokens)
        else:
            handoff.sampled(tokens)
        self.node.tokens[call.rid, 0] += tokens
        if len(handoff.outputs[0]) == call.max_tokens:  # the request has ended
            del self.attempts[call.rid]
            self.node.obey(Cancel(call.rid))
            self._give_back(call, now)

    def _start(self, rid: int, cached: int, now: float) -> None:
        call = Call(rid, self.peer, self.prompts[rid], self.wanted[rid].max_tokens, cached)
        self.attempts[rid] = Attempt(Handoff(rid, self.peer, "p", len(call.prompt), now), call)
        self.outbox.append(Request("prefill", call, now))

    def _attempt(self, call: Call) -> Attempt | None:
        attempt = self.attempts.get(call.rid)
        return attempt if attempt is not None and attempt.call is call else None

    def _give_up(self, attempt: Attempt, now: float) -> None:
        del self.attempts[attempt.call.rid]
        self.node.obey(PrefillLocally(attempt.call.rid, attempt.handoff.outputs))
        self._give_back(attempt.call, now)

    def _give_back(self, call: Call, now: float) -> None:
        call.wanted = False
        if call.lease is not None:
            self.outbox += [Request("hang up", call, now), Request("release", call, now)]
            call.open = False
