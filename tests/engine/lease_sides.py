"""P and D for lease tests: real Handoff, LeaseTable and engines, a toy model, and frontends in a few lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from slow_connector import SlowConnector
from toy import ToyRunner, reference
from toy_node import BLOCK, Node

from decode_node.handoff import Action, Event, Handoff, HandoffFailed, HandoffPeer, ToPeer
from engine.ipc.messages import (
    Cancel,
    Connect,
    Disconnect,
    FreeLease,
    Leased,
    Mode,
    PrefillLocally,
    StartRead,
)
from pdserve.errors import PeerError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import Peer, SamplingParams
from pdserve.rpc.timeouts import DEFAULT_TIMING
from prefill_node.leases import LeaseTable

SECONDS, GUARD = 3.0, 1.0
P_BLOCKS, D_BLOCKS = 14, 12
AHEAD = 2  # tokens after the first
Tokens = tuple[int, ...]  # of the only choice: first one token, then those that P decodes ahead
StreamEvent = pb.PrefillEvent | Tokens | PeerError  # to D; the error ends the stream
KINDS = {pb.ExtendRequest: "extend", pb.ReleaseRequest: "release", pb.Cancel: "cancel"}


@dataclass
class Call:
    """A prompt sent to P on a stream of its own, so that each can break by itself."""

    rid: int  # on D
    epoch: str
    prompt: list[int]
    max_tokens: int
    skip: int
    handoff: Handoff
    open: bool = True  # to D
    events: deque[StreamEvent] = field(default_factory=deque)
    announced: list[tuple[int, int]] = field(default_factory=list)  # (P's block, its first token)
    num_reads: int = 0  # in flight
    given_back: list[str] = field(default_factory=list)  # "cancel" and "release" that D has sent


@dataclass(frozen=True)
class Request:
    """A message in flight to P; without ``message``, the prompt or the end of the stream."""

    kind: str  # prefill, cancel, extend, release, hang up
    call: Call
    message: ToPeer | None = None


@dataclass(frozen=True)
class Reply:
    """An answer in flight to D."""

    call: Call
    event: pb.PrefillEvent


class PrefillSide:
    """P's LeaseTable and engine, with a minimal frontend."""

    def __init__(self, depth: tuple[int, int]) -> None:
        self.node = Node(P_BLOCKS, *depth)
        self.table = LeaseTable(self.node.epoch, SECONDS, GUARD)
        self._numbers = count(1)
        self._calls: dict[int, Call] = {}  # by lease; not ended
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
        self.node.submit(lease, call.prompt, sampling, Mode.LEASE, call.skip, decode_ahead=AHEAD)
        call.events.append(pb.PrefillEvent(accepted=pb.Accepted(lease=lease)))

    def release(self, epoch: str, lease: int) -> bool:
        kept, free = self.table.release(epoch, lease)
        if free:
            self._free(lease)
        return kept

    def hang_up(self, call: Call) -> None:
        for lease in [lease for lease, mine in self._calls.items() if mine is call]:
            del self._calls[lease]
            self.node.obey(Cancel(lease))
            if self.table.cancel(lease):
                self._free(lease)

    def expire(self, now: float) -> None:
        for lease in self.table.expire(now):
            self._free(lease)

    def step(self, now: float) -> None:
        batch = self.node.step()
        for rid, _, token_id, *_ in batch.outputs.rows():
            if rid in self._computing:
                self._samples[rid] += (token_id,)
            elif (call := self._calls.get(rid)) is not None:
                call.events.append((token_id,))
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
            blocks, num_tokens = leased.block_ids, leased.num_tokens
            ready = pb.KVReady(lease=lease, lease_ms=int(SECONDS * 1000), block_ids=blocks, num_tokens=num_tokens)
            call.events.append(pb.PrefillEvent(kv_ready=ready))

    def _free(self, lease: int) -> None:
        call = self._calls.pop(lease, None)
        if lease in self._computing:
            self._computing.discard(lease)
            if call is not None:
                call.events.append(pb.PrefillEvent(failed=pb.Failure(message="the lease has ended")))
        self.node.obey(FreeLease(lease))


class DecodeSide:
    """D's Handoffs and engine, with a minimal frontend. ``sent`` holds requests to P until the network takes them."""

    def __init__(self, depth: tuple[int, int], memory_of: Callable[[str], ToyRunner | None]) -> None:
        self.connector = SlowConnector("d", memory_of)
        self.node = Node(D_BLOCKS, *depth, connector=self.connector)
        self.connector.runner = self.node.runner
        self.peer = ""  # connected epoch of P
        self.prompts: dict[int, list[int]] = {}
        self.wanted: dict[int, SamplingParams] = {}  # requests that have not been cancelled
        self.calls: dict[int, Call] = {}  # by rid, with active handoffs
        self.sent: list[Request] = []
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
        if (call := self.calls.get(rid)) is not None:
            self._act(call, call.handoff.give_up(), now)

    def step(self, now: float) -> None:
        batch = self.node.step()
        for reserved in batch.reserved:
            if reserved.rid in self.wanted:
                self._start(reserved.rid, reserved.cached_tokens, now)
        for read in batch.reads:
            if read.rid in self.calls:
                self.calls[read.rid].num_reads -= 1
                self.on(self.calls[read.rid], read, now)
        for rid, params in self.wanted.items():
            tokens = self.node.tokens[rid, 0]
            assert tokens == reference(self.prompts[rid], 0, params.max_tokens)[: len(tokens)], "a wrong token"

    def hear(self, call: Call, event: StreamEvent, now: float) -> None:
        """Receive the next event of a stream."""
        if isinstance(event, tuple):
            if call.handoff.active:
                self._receive_tokens(call, event, now)
            return
        if isinstance(event, PeerError):
            call.open = False
        elif event.HasField("kv_ready"):
            start = call.skip // BLOCK + len(call.announced)
            call.announced += [(block, BLOCK * (start + i)) for i, block in enumerate(event.kv_ready.block_ids)]
        self.on(call, event, now)

    def on(self, call: Call, event: Event, now: float) -> None:
        self._act(call, call.handoff.on(event, now), now)

    def tick(self, now: float) -> None:
        for call in list(self.calls.values()):
            if call.handoff.wake_at <= now:
                self.on(call, None, now)
        for call in self.calls.values():
            assert now < call.handoff.limit or not call.num_reads, "D goes on reading after its limit"

    def _act(self, call: Call, actions: list[Action], now: float) -> None:
        for action in actions:
            match action:
                case HandoffFailed():
                    self.node.obey(PrefillLocally(call.rid, call.handoff.outputs))
                case pb.ExtendRequest() | pb.ReleaseRequest() | pb.Cancel():
                    self._send(call, action)
                case _:
                    if isinstance(action, StartRead):
                        assert now < call.handoff.limit, "D begins a read after its limit"
                        call.num_reads += 1
                    self.node.obey(action)
        if not call.handoff.active:
            self.calls.pop(call.rid, None)
        if call.handoff.done:
            call.open = False

    def _send(self, call: Call, message: ToPeer) -> None:
        kind = KINDS[type(message)]
        if kind != "extend":
            assert kind not in call.given_back, f"D sends {kind} twice"
            assert call.given_back in ([], ["cancel"]), f"D sends {kind} after {call.given_back}"
            call.given_back.append(kind)
        self.sent.append(Request(kind, call, message))

    def _receive_tokens(self, call: Call, tokens: Tokens, now: float) -> None:
        handoff = call.handoff
        if handoff.outputs:
            (token,) = tokens
            handoff.add_next_token(token, call.max_tokens)
        else:
            handoff.add_first_tokens(tokens)
        self.node.tokens[call.rid, 0] += tokens
        if len(handoff.outputs[0]) == call.max_tokens:  # the request has ended
            self.node.obey(Cancel(call.rid))
            self._act(call, handoff.give_up(), now)

    def _start(self, rid: int, cached: int, now: float) -> None:
        prompt = self.prompts[rid]
        handoff = Handoff(rid, rid, HandoffPeer("p", self.peer, DEFAULT_TIMING), len(prompt), now)
        call = self.calls[rid] = Call(rid, self.peer, prompt, self.wanted[rid].max_tokens, cached, handoff)
        self.sent.append(Request("prefill", call))
