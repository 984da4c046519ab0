"""P and D for lease tests: real Handoff, LeaseTable and engines, a toy model, and frontends in a few lines."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappush
from itertools import count

from toy import reference, state_after
from toy_node import BLOCK, Node

from node.leasing.leases import Lease, LeaseId, LeaseTable
from node.reading.handoff import Action, Event, Handoff, HandoffFailed, ToPeer
from pdserve.errors import Overloaded, PeerError
from pdserve.ipc.messages import (
    Cancel,
    ComputeBeside,
    Connect,
    Disconnect,
    EventBatch,
    FreeLease,
    LeaseCached,
    Leased,
    Mode,
    PrefillLocally,
    StartRead,
)
from pdserve.kv.states import NO_SLOT, handoff_position
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import Peer
from pdserve.rpc.errors import failure_to_pb
from pdserve.rpc.timeouts import DEFAULT_TIMING
from pdserve.sampling_params import SamplingParams

SECONDS = 3.0
GUARD = 1.0
FINISHED = pb.PrefillEvent(finished=pb.Finished())
REVOKED = pb.PrefillEvent(released=pb.Released(revoked=True))
Tokens = tuple[int, ...]  # the first token of each choice, or one that P decodes ahead
StreamEvent = pb.PrefillEvent | Tokens | PeerError  # to D; the error ends the stream
_streams = count(1_000_001)  # prompts of peers; a node may have requests of its own, too


@dataclass(frozen=True)
class Job:
    """A request to D. The first ``done`` tokens of each choice come from another D, unless a choice ends with them."""

    prompt: list[int]
    sampling: SamplingParams
    mode: Mode = Mode.HANDOFF
    done: int = 0
    ahead: int = 0  # tokens that P may decode ahead
    pull: bool = False  # D reads what P has cached, as P serves the same request
    beside: int = 0  # first blocks that D computes while it pulls the others, where its kind of KV allows that

    @property
    def for_peer(self) -> bool:
        """D computes the prompt for another node, as a prefill node does after a pull."""
        return self.mode.for_peer

    @cached_property
    def resume(self) -> dict[int, list[int]]:
        """Output so far of each resumed choice; empty for a new request."""
        return {choice: whole[: self.done] for choice, whole in enumerate(self.whole) if 0 < self.done < len(whole)}

    @cached_property
    def expected(self) -> list[list[int]]:
        """Tokens that D must output, by choice."""
        return [whole[self.done :] for whole in self.whole] if self.resume else self.whole

    @property
    def handoff_tokens(self) -> list[int]:
        """Tokens whose KV P computes: with a single resumed choice, its output without the last token, too.

        In a pull of a new prompt, D computes the last token.
        """
        if self.pull and not self.resume:
            return self.prompt[:-1]
        return self.prompt + next(iter(self.resume.values()))[:-1] if len(self.resume) == 1 else self.prompt

    @property
    def prefill_sampling(self) -> SamplingParams:
        """Sampling parameters for P."""
        return self.sampling.for_kv(len(self.resume)) if self.resume else self.sampling

    @cached_property
    def whole(self) -> list[list[int]]:
        """The whole output, by choice."""
        sampling = self.sampling
        return [
            reference(self.prompt, choice, sampling.max_tokens, sampling.stop_token_ids) for choice in range(sampling.n)
        ]


@dataclass
class Call:
    """A prompt sent to P on a stream of its own, so that each can break by itself."""

    rid: int  # on D
    epoch: str
    job: Job
    skip: int
    handoff: Handoff
    open: bool = True  # to D
    events: deque[StreamEvent] = field(default_factory=deque)
    announced: list[tuple[int, int]] = field(default_factory=list)  # (P's block, its first token)
    num_announced: int = 0  # tokens
    num_reads: int = 0  # in flight
    stream: int = field(default_factory=_streams.__next__)  # unique, also the prompt's rid on P
    expired_early: bool = False  # P has freed it before the agreed time, and D must notice
    released: bool = False  # D has sent Release
    ended: bool = False  # D has received the stream's end

    @property
    def lease(self) -> LeaseId:
        return LeaseId(self.stream, self.rid)


@dataclass(frozen=True)
class Request:
    """A message in flight to P; without ``message``, the prompt or the end of the stream."""

    kind: str  # prefill, extend, release, close (the end of the stream)
    call: Call
    message: ToPeer | None = None


@dataclass(frozen=True)
class Reply:
    """An answer in flight to D."""

    call: Call
    event: pb.PrefillEvent


class PrefillSide:
    """P's LeaseTable and engine, with a minimal frontend."""

    has_both_roles = False  # requests of the node itself take blocks, too

    def __init__(self, node: Node) -> None:
        self.node = node
        self.table: LeaseTable[Lease] = LeaseTable(SECONDS, GUARD)
        self._calls: dict[int, Call] = {}  # calls that have not ended; all dicts are by rid
        self._leases: dict[int, LeaseId] = {}
        self._samples: dict[int, Tokens] = {}
        self._unleased: dict[int, Job] = {}  # until the last blocks are announced
        self._served: dict[int, Job] = {}  # by rid; requests of P itself
        self.to_revoke: list[int] = []  # rids whose leases the engine wants back
        self.revoked: set[int] = set()  # rids

    @property
    def epoch(self) -> str:
        return self.node.epoch

    def prefill(self, call: Call) -> None:
        rid = call.stream
        job = call.job
        self.table.accept(Lease(call.lease))
        self._calls[rid] = call
        self._leases[rid] = call.lease
        self._samples[rid] = ()
        self._unleased[rid] = job
        if job.pull:
            token_ids = array("I", job.handoff_tokens).tobytes()
            self.node.obey(LeaseCached(rid=rid, token_ids=token_ids, cache_salt="", skip_tokens=call.skip))
            return
        self.node.submit(rid, job.handoff_tokens, job.prefill_sampling, Mode.LEASE, call.skip, decode_ahead=job.ahead)

    def serve(self, job: Job) -> None:
        """Serve the request on this node, so that its KV enters the prefix cache."""
        rid = next(_streams)
        self._served[rid] = job
        self.node.submit(rid, job.prompt, job.sampling, Mode.LOCAL)

    def assert_served(self) -> None:
        """Assert that peers which read its blocks have changed no token of this node."""
        for rid, job in self._served.items():
            for choice, expected in enumerate(job.whole):
                assert self.node.tokens[rid, choice] == expected, "not served"

    def release(self, lease: LeaseId) -> bool:
        stood, free = self.table.release(lease)
        if free:
            self._free(lease)
        return stood

    def close_stream(self, call: Call) -> None:
        if self._calls.pop(call.stream, None) is not None:
            self.node.obey(Cancel(call.stream))
            if self.table.cancel(call.lease):
                self._free(call.lease)

    def revoke(self, rid: int) -> None:
        """Take a lease back for the engine, unless it has ended."""
        self.to_revoke.remove(rid)
        lease = self._leases[rid]
        if self.table.revoke(lease):
            self.revoked.add(rid)
            if (call := self._calls.get(rid)) is not None:
                call.events.append(REVOKED)
            self._unleased.pop(rid, None)
            self._free(lease)

    def expire(self, now: float) -> None:
        for lease in self.table.expire(now):
            self._free(lease.id)

    def expire_lease(self, call: Call, now: float) -> None:
        """Let the time of a call's lease pass, and of no other, as if P's clock was wrong."""
        call.expired_early = True
        entry = self.table._leases.get(call.lease)
        if entry is not None and entry.granted:
            entry.ends = now
            heappush(self.table._heap, (now, call.lease))
        self.expire(now)

    def step(self, now: float) -> None:
        self.take(self.node.step(), now)

    def take(self, batch: EventBatch, now: float) -> None:
        """Handle the events of a step."""
        for refused in batch.refused:
            if (call := self._calls.pop(refused.rid, None)) is not None:
                cancelled = self.table.cancel(call.lease)
                may_be_late = (
                    self.has_both_roles or self.node.scheduler.pool.groups.has_windows
                )  # P may lack room for later parts
                assert cancelled or may_be_late, "a prompt was refused after its first part"
                del self._unleased[refused.rid]
                error = Overloaded(refused.message) if refused.kind == "Overloaded" else PeerError(refused.message)
                call.events.append(pb.PrefillEvent(failed=failure_to_pb(error)))
                if cancelled:
                    self._free(call.lease)
        for rid, _, token_id, *_ in batch.outputs.rows():
            if rid in self._unleased:
                self._samples[rid] += (token_id,)
            elif (call := self._calls.get(rid)) is not None:
                call.events.append((token_id,))
        for leased in batch.leased:
            if leased.block_ids:
                self._announce(leased, now)
            elif (call := self._calls.get(leased.rid)) is not None:
                call.events.append(FINISHED)
                self.close_stream(call)
        self.to_revoke += batch.revoke

    def _announce(self, leased: Leased, now: float) -> None:
        rid = leased.rid
        job = self._unleased.get(leased.rid)
        complete = leased.last
        if not self.table.announce(self._leases[rid], complete, now):
            return
        assert job is not None, "blocks follow the last ones of a prompt"
        samples = self._samples[rid]
        num_choices = 0 if job.pull else job.prefill_sampling.n
        if complete:
            assert len(samples) >= num_choices, "the last blocks come before the first tokens"
            del self._unleased[rid]
        call = self._calls.get(rid)
        if call is None:
            return
        if complete and not job.pull:
            call.events.append(samples[:num_choices])
        ready = pb.KVReady(
            lease_ms=int(SECONDS * 1000),
            block_ids=leased.block_ids,
            state_slot=None if leased.state_slot == NO_SLOT else leased.state_slot,
            num_tokens=leased.num_tokens,
            digests=leased.digests,
        )
        call.events.append(pb.PrefillEvent(kv_ready=ready))
        if complete:
            call.events += [FINISHED, *((token,) for token in samples[num_choices:])]

    def _free(self, lease: LeaseId) -> None:
        rid = lease.stream
        call = self._calls.pop(rid, None)
        if self._unleased.pop(rid, None) is not None and call is not None:
            call.events.append(pb.PrefillEvent(failed=pb.Failure(message="the lease has ended")))
        self.node.obey(FreeLease(rid))


class DecodeSide:
    """D's Handoffs and engine, with a minimal frontend. ``sent`` holds requests to P until the network takes them."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.peer = ""  # connected epoch of P
        self.jobs: dict[int, Job] = {}  # by rid
        self.cancelled: set[int] = set()
        self.calls: dict[int, Call] = {}  # by rid, with active handoffs
        self.sent: list[Request] = []
        self._rids = count(1)

    @property
    def wanted(self) -> list[int]:
        """Requests that have not been cancelled."""
        return [rid for rid in self.jobs if rid not in self.cancelled]

    def submit(self, job: Job) -> int:
        rid = next(self._rids)
        self.jobs[rid] = job
        self.node.submit(rid, job.prompt, job.sampling, job.mode, resume=job.resume)
        return rid

    def connect(self, p: PrefillSide) -> None:
        if self.peer:
            self.node.obey(Disconnect(self.peer))
        self.peer = p.epoch
        self.node.obey(Connect(Peer("p", p.epoch, (p.node.kv,))))

    def cancel(self, rid: int, now: float) -> None:
        self.node.obey(Cancel(rid))
        if self.jobs[rid].for_peer:
            self.node.obey(FreeLease(rid))
        self.cancelled.add(rid)
        if (call := self.calls.get(rid)) is not None:
            self._act(call, call.handoff.give_up(), now)

    def give_up(self, call: Call, now: float) -> None:
        """Prefill the prompt on D, for no reason of the protocol."""
        self._act(call, [*call.handoff.give_up(), HandoffFailed(PeerError("given up"))], now)

    def step(self, now: float) -> None:
        self.take(self.node.step(), now)

    def take(self, batch: EventBatch, now: float) -> None:
        """Handle the events of a step."""
        for_peers = self.read_here
        for refused in batch.refused:
            if refused.rid in for_peers:
                self.cancel(refused.rid, now)  # the requesting node computes the prompt
        for leased in batch.leased:
            if leased.rid in for_peers:
                self._take_leased(leased)
        for reserved in batch.reserved:
            if reserved.rid not in self.cancelled:
                self.start(reserved.rid, reserved.cached_tokens, now)
        for read in batch.reads:
            if read.rid in self.calls:
                self.calls[read.rid].num_reads -= 1
                self.on(self.calls[read.rid], read, now)
        for checked in batch.checked:
            if checked.rid in self.calls:
                self.on(self.calls[checked.rid], checked, now)
        for rid, job in self.jobs.items():
            for choice, expected in enumerate(job.expected):
                tokens = self.node.tokens[rid, choice]
                assert tokens == expected[: len(tokens)], "a wrong token"

    @property
    def read_here(self) -> set[int]:
        """Prompts for other nodes, in whose place this side reads what is leased."""
        return {rid for rid, job in self.jobs.items() if job.for_peer}

    def epoch_of(self, job: Job) -> str:
        """Return the epoch of the node that has the KV of a request, or computes it."""
        return self.peer

    def _take_leased(self, leased: Leased) -> None:
        """Read blocks as the peer of a prompt would, which releases the lease after the last ones."""
        prompt = self.jobs[leased.rid].prompt
        size = BLOCK
        first = -(-leased.num_tokens // size) - len(leased.block_ids)
        for index, block in enumerate(leased.block_ids, first):
            tokens = prompt[index * size : min(leased.num_tokens, (index + 1) * size)]
            cached = self.node.runner.cache[block, 0, 0, 0, : len(tokens), 0].tolist()
            assert cached == tokens, f"block {block} is leased to a peer without its KV"
        if leased.last and self.node.scheduler.states.recurrent:
            end = handoff_position(len(prompt), self.jobs[leased.rid].sampling.n, size)
            state = self.node.runner.state_in(leased.state_slot)
            assert state == state_after(prompt[:end]), "a state of other tokens is leased to a peer"
        if leased.last:
            self.node.obey(FreeLease(leased.rid))

    def assert_served(self) -> None:
        """Assert that every request has all of its tokens."""
        for rid in self.wanted:
            tokens = [self.node.tokens[rid, choice] for choice in range(self.jobs[rid].sampling.n)]
            assert tokens == self.jobs[rid].expected, "not served"

    def start(self, rid: int, cached: int, now: float) -> None:
        """Begin a handoff of the prompt."""
        job = self.jobs[rid]
        if cached >= len(job.handoff_tokens):
            self.node.obey(PrefillLocally(rid))
            return
        meeting = cached + BLOCK * job.beside
        scheduler = self.node.scheduler
        plain = not scheduler.states.recurrent and not scheduler.pool.groups.has_windows
        if job.pull and plain and cached < meeting < len(job.handoff_tokens):
            self.node.obey(ComputeBeside(rid, meeting))
            cached = meeting
        peer = Peer("p", self.epoch_of(job), ())
        handoff = Handoff(
            rid,
            rid,
            len(job.handoff_tokens),
            peer=peer,
            timing=DEFAULT_TIMING,
            sent_at=now,
            pull=job.pull,
        )
        call = self.calls[rid] = Call(rid, peer.epoch, job, cached, handoff)
        self.sent.append(Request("prefill", call))

    def read(self, call: Call, order: StartRead) -> None:
        """Begin a read."""
        call.num_reads += 1
        self.node.obey(order)

    def receive(self, call: Call, event: StreamEvent, now: float) -> None:
        """Receive the next event of a stream. P may send more on a broken stream until it notices; that is lost."""
        if call.ended:
            return
        if isinstance(event, tuple):
            if call.handoff.active:
                self._receive_tokens(call, event, now)
            return
        if isinstance(event, PeerError):
            call.open = False
            call.ended = True
        elif event.HasField("kv_ready"):
            ready = event.kv_ready
            start = max(call.skip, call.num_announced) // BLOCK
            end = -(-ready.num_tokens // BLOCK)
            call.num_announced = ready.num_tokens
            position = ready.num_tokens if call.job.pull else len(call.job.handoff_tokens) - 1
            pairs = self.node.scheduler.pool.groups.pairs(start, end, position, BLOCK)
            call.announced += [(block, BLOCK * at) for block, (at, _) in zip(ready.block_ids, pairs, strict=True)]
        self.on(call, event, now)

    def on(self, call: Call, event: Event, now: float) -> None:
        self._act(call, call.handoff.on(event, now), now)

    def tick(self, now: float) -> None:
        for call in list(self.calls.values()):
            if call.handoff.wake_at <= now:
                self.on(call, None, now)
        for call in self.calls.values():
            assert now < call.handoff.limit or not call.num_reads, "D keeps reading after its limit"

    def _act(self, call: Call, actions: list[Action], now: float) -> None:
        for action in actions:
            match action:
                case HandoffFailed():
                    self.node.obey(PrefillLocally(call.rid, call.handoff.outputs))
                case pb.ExtendRequest():
                    self.sent.append(Request("extend", call, action))
                case pb.ReleaseRequest():
                    assert not call.released, "D sends Release twice"
                    call.released = True
                    self.sent.append(Request("release", call, action))
                case StartRead():
                    assert now < call.handoff.limit, "D begins a read after its limit"
                    self.read(call, action)
                case _:
                    self.node.obey(action)
        if not call.handoff.active:
            self.calls.pop(call.rid, None)
            call.open = False

    def _receive_tokens(self, call: Call, tokens: Tokens, now: float) -> None:
        handoff = call.handoff
        job = call.job
        if handoff.outputs:
            (token,) = tokens
            handoff.add_next_token(token, job.prefill_sampling.max_tokens)
        else:
            handoff.add_first_tokens(tokens)
        if job.resume:
            return  # the client has these tokens
        for choice, token in enumerate(tokens):
            self.node.tokens[call.rid, choice].append(token)
        if [*map(list, handoff.outputs)] == job.expected:  # the request has ended
            self.node.obey(Cancel(call.rid))
            self._act(call, handoff.give_up(), now)
