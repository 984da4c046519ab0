"""A node of a virtual fleet: the real scheduler, in virtual time.

The scheduler plans each step, the card says how long the step takes, and the scheduler takes its results. So chunks,
pauses, admission, preemption, the prefix cache and measured costs are the product's. Only the step loop, the messages
and the state machine of handoffs are modelled:

    plan of step k+1 ──┐ 1 ms before step k ends, or with its beginning if it has no prompts
    device    ▐ step k ▌ step k+1 ▌         commands and ended reads take effect at once

    P   ▌last chunk▐ ─ first token, last blocks ─► D  reads ─► asks P whether the lease stood ─► joins the next step
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple, Protocol

from cli.virtual_fleet.cards import H100, MEASURED_DELAYS, Card, Delays
from cli.virtual_fleet.events import Events
from cli.virtual_fleet.jobs import Job
from engine.kv_cache.connector_scheduler import KVConnectorScheduler
from engine.peers.connected_peers import ConnectedPeers
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_config import FULL_STEP, TILE, SchedulerConfig
from node.reports import PromptShare
from pdserve.config.simulated_costs import SimulatedSteps
from pdserve.ipc.messages import (
    Cancel,
    FreeLease,
    HandoffEnds,
    KVConfirmed,
    LastChunk,
    LeaseCached,
    Leased,
    Mode,
    PrefillLocally,
    StartRead,
    Submit,
    ToEngine,
)
from pdserve.records import NO_STEP, KVConnectorOutput, KVRead, ModelRunnerOutput, ReadResult, StepOutput, StepPlan
from pdserve.request_cost import TTFT_OBJECTIVE, RequestLoad, StepCosts
from pdserve.sampling_params import SamplingParams

BLOCK = 16  # tokens
MAX_SEQS = 256  # sequences of a node
MAX_BATCH_TOKENS = 8192
DECODE_AHEAD = 3  # tokens after the first that P samples at most
MIN_LEFT = 16  # tokens left, below which a job does not move: see router/generation
REST = 5.0  # seconds between two moves of a job
LEAD = 1e-3  # seconds before the end of a step at which the next one is planned


@dataclass(eq=False, slots=True)
class _Handoff:
    """A prompt at P for D."""

    job: Job
    source: SimulatedNode
    target: SimulatedNode
    resumes: bool  # a move: the client has the tokens so far
    rid: int  # on D
    peer_rid: int = 0  # on P
    announced: int = 0  # tokens
    complete: bool = False  # all parts are announced
    reads: int = 0  # in flight
    outputs: list[int] = field(default_factory=list)
    peer_tokens: int = 0  # sampled by P
    decodes_ahead: bool = True  # P decodes ahead, or will
    deferred: Callable[[], None] | None = None  # runs at P's next token, or at the end of decode-ahead
    over: bool = False

    def add_peer_token(self) -> None:
        self.peer_tokens += 1
        self.decodes_ahead = self.peer_tokens < min(1 + DECODE_AHEAD, self.job.output)
        self._answer()

    def end_ahead(self) -> None:
        self.decodes_ahead = False
        self._answer()

    def _answer(self) -> None:
        deferred = self.deferred
        self.deferred = None
        if deferred is not None:
            deferred()


class Client(Protocol):
    """Receives the outcomes of jobs."""

    def on_first_token(self, job: Job, handed_off_by: SimulatedNode | None) -> None: ...

    def on_end(self, job: Job) -> None: ...


_rids = count(1)
_TOKEN = (1).to_bytes(4, "little")  # every output token


class Usage(NamedTuple):
    """Totals of a node since its start."""

    steps: float  # seconds in which a step executed
    decodes: float  # seconds of steps, times the sequences that they decoded
    read_tokens: int  # tokens whose KV was read from peers


class SimulatedNode:
    """``target``: ITL target in seconds; None: automatic, 0: none. ``ttft_target``: TTFT target in seconds; 0: none."""

    def __init__(
        self,
        events: Events,
        name: str,
        role: str,
        client: Client,
        *,
        target: float | None = None,
        ttft_target: float = TTFT_OBJECTIVE,
        card: Card = H100,
        device: str = "cuda",
        delays: Delays = MEASURED_DELAYS,
        max_num_seqs: int = MAX_SEQS,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
    ) -> None:
        self.name = name
        self.role = role
        self._events = events
        self._client = client
        self._costs = card.costs
        self._delays = delays
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=card.kv_tokens // BLOCK,
                block_size=BLOCK,
                max_num_seqs=max_num_seqs,
                max_batch_tokens=max_batch_tokens,
                full_step=FULL_STEP[device],
                tile=TILE[device],
                max_waiting=1 << 30,
                itl_target=target,
                ttft_target=ttft_target,
                idle_step=card.idle_step,
            ),
            connector=lambda parts: KVConnectorScheduler(parts, ConnectedPeers(parts)),
            clock=lambda: events.now,
        )
        self._jobs: dict[int, Job] = {}  # jobs that decode here, by rid
        self._targets: dict[int, SimulatedNode] = {}  # where jobs go that move after their next token, by rid
        self._handoffs: dict[int, _Handoff] = {}  # by rid, on D and on P
        self._steps = SimulatedSteps(card.costs)
        self._share = PromptShare(0.0)
        self._reads_until = 0.0
        self._executing: StepPlan | None = None
        self._step_seconds = 0.0
        self._ends_at = 0.0  # when the executing step ends
        self._planned: StepPlan | None = None  # the step after it
        self.usage = Usage(0.0, 0.0, 0)

    # ------------------------------------------------------------ requests

    def serve(self, job: Job, peer: SimulatedNode | None, resume: int = 0) -> None:
        """Decode a job. ``peer`` computes its prompt, if any, or its KV after ``resume`` tokens of output."""
        job.node = self.name
        job.rid = next(_rids)
        self._jobs[job.rid] = job
        if peer is not None:
            self._handoffs[job.rid] = _Handoff(job, peer, self, resume > 0, job.rid)
        submit = Submit(
            rid=job.rid,
            token_ids=job.prompt_ids(),
            sampling=SamplingParams(max_tokens=job.output, temperature=0.0),
            mode=Mode.LOCAL if peer is None else Mode.HANDOFF,
            age=self._events.now - job.at,
            resume={0: _TOKEN * resume} if resume else {},
        )
        self.obey(submit)

    def _prefill(self, handoff: _Handoff, cached: int) -> None:
        """Compute the prompt of a handoff for its D, or lease the cached blocks of a stream that has moved."""
        job = handoff.job
        handoff.peer_rid = next(_rids)
        token_ids = job.prompt_ids() + (_TOKEN * (job.tokens - 1) if handoff.resumes else b"")
        self._handoffs[handoff.peer_rid] = handoff
        if handoff.resumes:
            self.obey(LeaseCached(handoff.peer_rid, token_ids, "", cached))
            return
        submit = Submit(
            rid=handoff.peer_rid,
            token_ids=token_ids,
            sampling=SamplingParams(max_tokens=job.output, temperature=0.0),
            mode=Mode.LEASE,
            skip_tokens=cached,
            decode_ahead=DECODE_AHEAD,
            age=self._events.now - job.at,
        )
        self.obey(submit)

    def movable(self, router: int) -> list[Job]:
        """See PromptRun.movable_tokens."""
        now = self._events.now

        def may_move(job: Job) -> bool:
            decodes = job.router == router and job.tokens > 0 and job.rid not in self._handoffs
            return decodes and job.output - job.tokens >= MIN_LEFT and now > job.moved_at + REST

        jobs = filter(may_move, self._jobs.values())
        return sorted(jobs, key=lambda job: (job.prompt + job.tokens, job.at))

    def move(self, job: Job, target: SimulatedNode) -> None:
        """Hand a decoding job over to another node, behind its next token."""
        self._targets[job.rid] = target
        job.moved_at = self._events.now

    def _move_now(self, job: Job, target: SimulatedNode) -> None:
        """Later tokens, of steps in flight, are dropped."""
        del self._jobs[job.rid]
        self._events.after(self._delays.message, partial(self.obey, Cancel(job.rid)))
        self._events.after(self._delays.message, partial(target.serve, job, self, job.tokens))

    def cached_tokens(self, hashes: Iterable[bytes]) -> int:
        """Return the tokens of the longest prefix of a chain of block hashes that this node has cached."""
        return BLOCK * len(self.scheduler.pool.match(hashes))

    # ------------------------------------------------------------ reports

    @property
    def prompt_share(self) -> float:
        return self._share.update(self.scheduler.totals.prompt_seconds, self._events.now)

    def report(self) -> tuple[RequestLoad, StepCosts]:
        """See NodeClient."""
        status = self.scheduler.status()
        load = RequestLoad(
            requests=status.waiting + status.running + status.reading,
            waiting=status.waiting,
            backlog=status.backlog,
            free_blocks=status.free,
            total_blocks=status.total,
            block_size=BLOCK,
            decoding=status.decoding,
            for_peers=status.for_peers,
            prompt_share=self.prompt_share,
            itl_target=status.itl_target,
            itl_limit=status.itl_limit,
            ttft_target=status.ttft_target,
        )
        return load, status.costs

    # ------------------------------------------------------------ step loop

    def obey(self, command: ToEngine) -> None:
        scheduler = self.scheduler
        match command:
            case Submit():
                scheduler.submit(command)
            case StartRead():
                scheduler.connector.peers.start_read(command)
            case HandoffEnds(rid, seconds):
                scheduler.loads.ends_in(rid, seconds)
            case LeaseCached():
                scheduler.connector.lease_cached(command)
            case KVConfirmed(rid, num_tokens, outputs, waited):
                scheduler.loads.confirmed(rid, num_tokens, outputs, waited)
            case PrefillLocally(rid, outputs):
                scheduler.loads.given_up(rid, outputs)
            case Cancel(rid):
                scheduler.cancel(rid)
            case FreeLease(rid):
                scheduler.free_lease(rid)
        self._advance()

    def _advance(self) -> None:
        """Reserve blocks and begin reads at once; begin a step if the device is idle."""
        scheduler = self.scheduler
        scheduler.room.admit_loads()
        self._post_reads(scheduler.connector.take_orders().reads)
        self._emit()
        if self._executing is None and not scheduler.idle:
            self._plan()

    def _post_reads(self, reads: Iterable[KVRead]) -> None:
        for read in reads:
            num_tokens = len(read.local_blocks) * BLOCK
            seconds = self._costs.of_read(num_tokens)
            self.usage = self.usage._replace(read_tokens=self.usage.read_tokens + num_tokens)
            self._reads_until = max(self._reads_until, self._events.now) + seconds
            result = ReadResult(read.read_id, "", 1, len(read.local_blocks), seconds)
            self._events.at(self._reads_until, partial(self._end_read, result))

    def _end_read(self, result: ReadResult) -> None:
        output = ModelRunnerOutput(StepOutput(NO_STEP), KVConnectorOutput((result,)))
        self.scheduler.connector.update(output)
        self._advance()

    def _plan(self) -> None:
        busy = 0.0 if self._executing is None else self._ends_at - self._events.now
        plan = self.scheduler.plan(busy)
        self._emit()
        if plan.scheduled:
            self._planned = plan
            if self._executing is None:
                self._begin()
        else:
            self._steps.seconds(plan)
        self.scheduler.prepare()

    def _begin(self) -> None:
        plan = self._planned
        self._planned = None
        assert plan is not None
        self._executing = plan
        self._step_seconds = seconds = self._steps.seconds(plan)
        self._ends_at = self._events.now + seconds
        steps, decodes, read_tokens = self.usage
        self.usage = Usage(steps + seconds, decodes + seconds * plan.num_decodes, read_tokens)
        self._events.after(max(0.0, seconds - LEAD) if plan.num_prompt_tokens else 0.0, self._plan)
        self._events.after(seconds, self._end_step)

    def _end_step(self) -> None:
        plan = self._executing
        self._executing = None
        assert plan is not None
        tokens = (1,) * sum(item.num_samples for item in plan.scheduled)
        self.scheduler.apply(plan, ModelRunnerOutput(StepOutput(plan.step, tokens)), self._step_seconds)
        if self._planned is not None:
            self._begin()
        self._emit()
        self._advance()

    # ------------------------------------------------------------ events of the engine

    def _emit(self) -> None:
        batch = self.scheduler.take_events()
        if batch is None:
            return
        for refused in batch.refused:
            self._on_refused(self._handoffs.pop(refused.rid))
        for ended in batch.last_chunks:
            self._on_last_chunk(ended)
        for rid in batch.outputs.rids:
            self._on_token(rid)
        for ahead in batch.decode_ahead_ended:
            self._handoffs[ahead.rid].end_ahead()
        for reserved in batch.reserved:
            handoff = self._handoffs[reserved.rid]
            self._events.after(self._delays.message, partial(handoff.source._prefill, handoff, reserved.cached_tokens))
        for leased in batch.leased:
            handoff = self._handoffs[leased.rid]
            self._events.after(self._delays.message, partial(handoff.target._on_part, handoff, leased))
        for read in batch.reads:
            self._on_read(self._handoffs[read.rid])

    def _on_token(self, rid: int) -> None:
        handoff = self._handoffs.get(rid)
        if handoff is not None and rid == handoff.peer_rid:
            handoff.add_peer_token()
            self._events.after(self._delays.message, partial(handoff.target._on_peer_token, handoff))
            return
        job = self._jobs.get(rid)
        if job is None:  # the job has moved
            return
        job.add_token(self._events.now)
        if job.tokens == 1:
            self._client.on_first_token(job, None)
        target = self._targets.pop(rid, None)
        if job.tokens == job.output:
            self._end(job)
        elif target is not None:
            self._move_now(job, target)

    def _end(self, job: Job) -> None:
        del self._jobs[job.rid]
        job.end = self._events.now
        self._client.on_end(job)

    # ------------------------------------------------------------ handoffs

    def _on_last_chunk(self, event: LastChunk) -> None:
        """On P: tell D."""
        handoff = self._handoffs[event.rid]
        command = HandoffEnds(handoff.rid, event.seconds)
        self._events.after(self._delays.message, partial(handoff.target.obey, command))

    def _on_refused(self, handoff: _Handoff) -> None:
        """On P: it has no room, so D computes the prompt."""
        handoff.over = True
        target = handoff.target
        target._handoffs.pop(handoff.rid)
        self._events.after(self._delays.message, partial(target.obey, PrefillLocally(handoff.rid)))

    def _on_part(self, handoff: _Handoff, part: Leased) -> None:
        """On D: P has announced blocks."""
        if handoff.over:
            return
        handoff.announced = part.num_tokens
        handoff.complete = part.last
        if part.block_ids:
            handoff.reads += 1
            self.obey(StartRead(handoff.rid, "", part.block_ids, part.num_tokens))
        else:
            self._end_reads(handoff)

    def _on_peer_token(self, handoff: _Handoff) -> None:
        """On D: P has sampled a token."""
        if handoff.over:
            return
        job = handoff.job
        handoff.outputs.append(1)
        job.add_token(self._events.now)
        if job.tokens == 1:
            self._client.on_first_token(job, handoff.source)
        if job.tokens == job.output:
            handoff.over = True
            self._events.after(self._delays.message, partial(handoff.source._release, handoff))
            self._end(job)
            self.obey(Cancel(handoff.rid))

    def _on_read(self, handoff: _Handoff) -> None:
        handoff.reads -= 1
        self._end_reads(handoff)

    def _end_reads(self, handoff: _Handoff) -> None:
        if handoff.complete and not (handoff.over or handoff.reads):
            seconds = self._delays.confirm + self._delays.message
            self._events.after(seconds, partial(handoff.source._ask_release, handoff))

    def _ask_release(self, handoff: _Handoff) -> None:
        """On P: D has read all. See Prefill.after_step."""

        def answer() -> None:
            self._release(handoff)
            self._events.after(self._delays.message, partial(handoff.target._confirm, handoff))

        if handoff.decodes_ahead and not handoff.resumes and not self.scheduler.status().backlog:
            handoff.deferred = answer
        else:
            answer()

    def _release(self, handoff: _Handoff) -> None:
        """On P: D has read all."""
        self.obey(FreeLease(handoff.peer_rid))
        self._handoffs.pop(handoff.peer_rid, None)

    def _confirm(self, handoff: _Handoff) -> None:
        """On D: the lease stood."""
        if not handoff.over:
            handoff.over = True
            del self._handoffs[handoff.rid]
            outputs = () if handoff.resumes else (tuple(handoff.outputs),)
            self.obey(KVConfirmed(handoff.rid, handoff.announced, outputs, self._events.now - handoff.job.last))
