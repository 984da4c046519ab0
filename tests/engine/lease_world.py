"""P and D with all product code that decides about a handoff; a test controls network and clocks.

    D  Handoff ─ Scheduler ─ SlowConnector          P  LeaseTable ─ Scheduler
         │                        └── bytes ──────────────┤ its memory
         └── requests, replies, one stream per call ──────┘

Requests and replies may arrive in any order, twice or never. The events of a call stay in order, and a call may break
at any point. Each public method of ``World`` is one event, and checks the invariants afterwards.
"""

from __future__ import annotations

from collections import deque
from itertools import count

from lease_sides import GUARD, SECONDS, Call, DecodeSide, Job, PrefillSide, Reply, Request
from slow_connector import SlowConnector, Transfer
from toy import ToyRunner
from toy_node import BATCH_TOKENS, BLOCK, Node

from node.leasing.leases import LeaseId
from node.reading.handoff import Phase
from pdserve.errors import PeerError
from pdserve.ipc.messages import Mode
from pdserve.pb import pdserve_pb2 as pb
from pdserve.sampling_params import SamplingParams

P_BLOCKS = 14
D_BLOCKS = 12
AHEAD = 2  # tokens that P may decode ahead
HOSTILE = 0  # stream on which no prompt is sent
SLOWEST = 0.7  # working clocks: a lease less its margin by such a clock is shorter than a lease and its guard


class World:
    """``rate`` is the speed of D's clock relative to P's.

    Below ``SLOWEST`` the clock is broken: P may free blocks that D reads, and D must notice.
    """

    def __init__(self, depth: tuple[int, int], rate: float) -> None:
        self.depth = depth
        self.rate = rate
        self.now = 0.0  # by P's clock
        self.prompts = count()
        self.p = self.make_p()
        self.d = self.make_d()
        self.d.connect(self.p)
        self.requests: list[Request] = []
        self.replies: list[Reply] = []
        self.calls: list[Call] = []

    def make_p(self) -> PrefillSide:
        return PrefillSide(Node(P_BLOCKS, *self.depth))

    def make_d(self) -> DecodeSide:
        connector = SlowConnector("d", self.memory_of)
        node = Node(D_BLOCKS, *self.depth, connector=connector)
        connector.runner = node.runner
        return DecodeSide(node)

    @property
    def connector(self) -> SlowConnector:
        assert isinstance(self.d.node.connector, SlowConnector)
        return self.d.node.connector

    @property
    def transfers(self) -> dict[int, Transfer]:
        """Reads of D in flight."""
        return self.connector.transfers

    @property
    def d_now(self) -> float:
        return 1000.0 + self.now * self.rate

    def memory_of(self, epoch: str) -> ToyRunner | None:
        return self.p.node.runner if epoch == self.p.epoch else None

    # ------------------------------------------------------------ events

    def submit(self, length: int, shared: bool, max_tokens: int) -> None:
        prompt = [0 if shared else next(self.prompts) % 900 + 1] * length
        self.d.submit(Job(prompt, SamplingParams(max_tokens=max_tokens), ahead=AHEAD))
        self.check()

    def move(self, length: int, max_tokens: int, done: int, beside: int) -> None:
        """Begin a request on P; after ``done`` tokens of its output, or a little earlier, it goes on on D."""
        prompt = [next(self.prompts) % 900 + 1] * length
        sampling = SamplingParams(max_tokens=max_tokens)
        job = Job(prompt, sampling, done=done, pull=True, beside=beside)
        self.p.serve(job)
        self.step(length // BATCH_TOKENS + done)
        self.d.submit(job)
        self.check()

    def pull_prefix(self, length: int, output: int, more: int, beside: int) -> None:
        """Serve a request on P, then compute its next turn on D for another node: ``more`` tokens after its output."""
        job = Job([next(self.prompts) % 900 + 1] * length, SamplingParams(max_tokens=output))
        self.p.serve(job)
        self.step(length // BATCH_TOKENS + output)
        turn = [*job.prompt, *job.whole[0], *[next(self.prompts) % 900 + 1] * more]
        self.d.submit(Job(turn, SamplingParams(max_tokens=1), Mode.PULL_AND_LEASE, pull=True, beside=beside))
        self.check()

    def step(self, both: int = 1) -> None:
        """Run a step of each engine."""
        for _ in range(both):
            self.p.step(self.now)
            self.d.step(self.d_now)
            self.check()

    def wait(self, seconds: float) -> None:
        """Let time pass; neither node checks its clock yet."""
        self.now += seconds
        self.check()

    def tick_p(self) -> None:
        self.p.expire(self.now)
        self.check()

    def tick_d(self) -> None:
        self.d.tick(self.d_now)
        self.check()

    def deliver(self, request: Request, again: bool = False) -> None:
        """Deliver a request to P; with ``again`` it can be delivered once more."""
        if not again:
            self.requests.remove(request)
        call = request.call
        p = self.p
        match request.kind:
            case "prefill" if call.epoch == p.epoch:
                p.prefill(call)
            case "prefill":
                call.events.append(pb.PrefillEvent(failed=pb.Failure(message="another epoch")))
            case "close":  # the end of the stream: the prompt cannot come later
                self.requests = [r for r in self.requests if r.call is not call or r.kind != "prefill"]
                p.close_stream(call)
        match request.message:
            case pb.ExtendRequest(ask=ask):
                lease_ms = int(p.table.extend(call.lease, self.now) * 1000)
                self.replies.append(Reply(call, pb.PrefillEvent(extended=pb.Extended(ask=ask, lease_ms=lease_ms))))
            case pb.ReleaseRequest():
                for prompt in [r for r in self.requests if r.call is call and r.kind == "prefill"]:
                    self.deliver(prompt)  # one stream: the prompt arrives first
                stood = p.release(call.lease)
                self.replies.append(Reply(call, pb.PrefillEvent(released=pb.Released(stood=stood))))
        self.check()

    def revoke(self, rid: int) -> None:
        """Have P's frontend take back a lease that its engine has asked for."""
        self.p.revoke(rid)
        self.check()

    def claim(self, number: int) -> None:
        """A hostile stream sends Extend and Release with the number of a prompt of D's streams."""
        lease = LeaseId(HOSTILE, number)
        assert not self.p.table.extend(lease, self.now), "another stream has extended a lease"
        assert not self.p.release(lease), "a lease stood for another stream"
        self.check()

    def deliver_all(self) -> None:
        """Deliver everything in flight except KV."""
        for rid in list(self.p.to_revoke):
            self.revoke(rid)
        for request in list(self.requests):
            if request in self.requests:  # an ended call may have removed its prompt
                self.deliver(request)
        for reply in list(self.replies):
            self.answer(reply)
        for call in list(self.calls):
            while call.events:
                self.announce(call)

    def drop(self, request: Request) -> None:
        """Drop a request. A dropped prompt ends its stream; D notices a missing answer by its clock."""
        self.requests.remove(request)
        if request.kind == "prefill":
            request.call.events.append(PeerError("the connection was lost"))
        self.check()

    def answer(self, reply: Reply) -> None:
        """Deliver a reply to D; one to a call that has ended, or of an earlier life of D, changes nothing."""
        self.replies.remove(reply)
        if self.d.calls.get(reply.call.rid) is reply.call:
            self.d.on(reply.call, reply.event, self.d_now)
        self.check()

    def drop_answer(self, reply: Reply) -> None:
        self.replies.remove(reply)
        self.check()

    def announce(self, call: Call) -> None:
        """Deliver the next event of a call to D."""
        self.d.receive(call, call.events.popleft(), self.d_now)
        self.check()

    def break_call(self, call: Call, arrived: int) -> None:
        """Break a call after ``arrived`` of its events in flight; P notices later."""
        call.events = deque([*list(call.events)[:arrived], PeerError("the connection was lost")])
        self.requests.append(Request("close", call))
        self.check()

    def land(self, read_id: int) -> None:
        """Land one more block of a read, or end the read."""
        if self.memory_of(self.transfers[read_id].epoch) is None:
            self.connector.fail(read_id)
        else:
            self.connector.land(read_id)
        self.check()

    def fail(self, read_id: int) -> None:
        self.connector.fail(read_id)
        self.check()

    def cancel(self, rid: int) -> None:
        self.d.cancel(rid, self.d_now)
        self.check()

    def reconnect(self) -> None:
        """Connect D to the present epoch of P, again if it is connected."""
        self.d.connect(self.p)
        self.check()

    def restart_p(self) -> None:
        """Restart P: memory, leases and calls are lost; messages in flight arrive at its next epoch."""
        self.p.node.close()
        self.p = self.make_p()
        for call in self.calls:
            if call.open:
                call.events = deque([*call.events, PeerError("the connection was lost")])
        self.check()

    def restart_d(self) -> None:
        """Restart D: reads and handoffs are lost; its messages in flight still arrive."""
        for call in self.calls:
            if call.open:
                self.requests.append(Request("close", call))
        self.calls.clear()
        self.replies.clear()
        self.d.node.close()
        self.d = self.make_d()
        self.d.connect(self.p)
        self.check()

    # ------------------------------------------------------------ invariants

    def check(self) -> None:
        """Check the invariants between the nodes; each node checks its own block counts."""
        for request in self.d.sent:
            self.requests.append(request)
            if request.kind == "prefill":
                self.calls.append(request.call)
        self.d.sent.clear()
        self.calls = [call for call in self.calls if call.open or call.events]
        self._check_announced_blocks()
        self._check_quarantine()

    def _check_announced_blocks(self) -> None:
        """Announced blocks are leased and unchanged at P until D's limit or until D gives up."""
        if self.rate < SLOWEST:
            return
        for call in self.d.calls.values():
            handoff = call.handoff
            if call.epoch != self.p.epoch or handoff.phase is not Phase.READING or self.d_now >= handoff.limit:
                continue
            if call.expired_early or call.stream in self.p.revoked:
                continue
            leased = self.p.node.leased.get(call.stream, ())
            for block, start in call.announced:
                assert block in leased, f"block {block} is not leased to D any more, which may read it"
                tokens = call.job.handoff_tokens[start : start + BLOCK]
                cached = self.p.node.runner.cache[block, 0, 0, 0, : len(tokens), 0].tolist()
                assert cached == tokens, f"block {block} was changed while D may read it"

    def _check_quarantine(self) -> None:
        """Transfers in flight write only to blocks of their own request or to quarantined blocks."""
        landing = [local for transfer in self.transfers.values() for local in transfer.order.local_blocks]
        assert len(landing) == len(set(landing)), "two transfers write to one block"
        node = self.d.node
        assert node.scheduler.pool.count_free(landing) == 0, "a transfer writes to a free block"
        assert not node.runner.used & set(landing), "a transfer writes to a block that the model uses"

    # ------------------------------------------------------------ the end

    def settle(self) -> None:
        """Without further faults, all requests and leases end within the time of a lease."""
        self.reconnect()
        for _ in range(400 + 50 * len(self.d.wanted)):
            for _ in range(100):
                if not (self.requests or self.replies or self.p.to_revoke or any(call.events for call in self.calls)):
                    break
                self.deliver_all()
            for read_id in list(self.transfers):
                while read_id in self.transfers:
                    self.land(read_id)
            self.step()
            self.tick_d()
            if self.at_rest:
                break
            if self.p.node.engine.idle and self.d.node.engine.idle:
                self.wait(0.5)
                self.tick_p()
        else:
            raise AssertionError("requests or leases do not end")
        self.wait(2 * (SECONDS + GUARD))
        self.tick_p()
        self.d.assert_served()
        self.p.assert_served()
        self.d.node.assert_all_free()
        self.p.node.assert_all_free()

    def close(self) -> None:
        self.p.node.close()
        self.d.node.close()

    @property
    def at_rest(self) -> bool:
        status = self.d.node.scheduler.status()
        if self.d.calls or self.requests or status.quarantined or status.waiting:
            return False
        if self.p.node.scheduler.status().waiting:  # for the blocks of leases
            return False
        return self.d.node.engine.idle and self.p.node.engine.idle
