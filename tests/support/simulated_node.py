"""A node of tests/support/fleet_simulation.py: it executes steps, each with the costs of an 8B model on an H200.

A step is planned while the one before it executes, so an arrival waits for two steps. If anything decodes, every second
step computes prompts and takes the ITL target, and sequences join in steps without (engine/scheduler/itl_target.py).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import msgspec

from engine.scheduler.itl_target import ARRIVAL, BURST, MANY_PROMPTS, PAUSE
from node.reports import PromptShare
from pdserve.request_cost import HANDOFF_SECONDS, TYPICAL, LinearCost, RequestLoad, StepCosts, auto_itl_target

BLOCK = 16  # tokens
KV_TOKENS = 800_000  # of a node
_MAX_SEQS = 256  # sequences of a node
_FULL_STEP = 2048  # prompt tokens of a step without decodes
_TYPICAL_CONTEXT = 2000  # tokens
_FIRST_TOKEN = 2.5e-3  # seconds that a handoff adds to the first token


class NodeCosts(NamedTuple):
    """Seconds: of steps and reads, and of a step per token of context of its decodes (cli/plan/measured)."""

    lines: StepCosts = TYPICAL
    context: float = 34.5e-9


class Events:
    """Simulated time, in seconds, and what happens later."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._order), what))

    def next(self) -> None:
        self.now, _, what = heapq.heappop(self._heap)
        what()


@dataclass(eq=False, slots=True)
class Job:
    """A request, and what became of it. Times are in seconds."""

    at: float
    prompt: int  # tokens
    output: int  # tokens
    router: int = 0
    node: SimulatedNode | None = None  # where it decodes
    computed: int = 0  # prompt tokens in planned steps
    first: float = 0.0  # time of the first token
    last: float = 0.0  # time of the last token before it joined its present node
    end: float = 0.0
    longest_gap: float = 0.0
    decoded: int = 0  # tokens after the first one, before it joined its present node
    joined: int = 0  # number of its node's decode step that produced its first token there
    due: int = 0  # number of its node's decode step that produces its last token

    @property
    def ttft(self) -> float:
        return self.first - self.at

    @property
    def per_token(self) -> float:
        return (self.end - self.first) / max(1, self.output - 1)


@dataclass(slots=True)
class _Step:
    seconds: float
    prompt_seconds: float
    decodes: int
    prompts_done: list[Job]
    joined: list[Job]  # sequences whose first token on this node this step produces
    ended: list[Job]


class SimulatedNode:
    """``target`` is the ITL target in seconds, None: automatic, 0: none. ``on_end`` receives each ended job."""

    def __init__(
        self,
        events: Events,
        name: str,
        role: str,
        target: float | None,
        costs: NodeCosts,
        on_end: Callable[[Job], None],
    ) -> None:
        self.name, self.role = name, role
        self._costs, self._lines = costs, costs.lines
        self.decoding: set[Job] = set()
        self._events, self._itl_target, self._on_end = events, target, on_end
        self._prompts: deque[Job] = deque()  # not completely planned
        self._joining: list[Job] = []  # with KV here, in no step yet
        self._due: list[tuple[int, int, Job]] = []  # a heap by the number of the last step
        self._order = count()
        self._steps: deque[_Step] = deque()  # the executing one, and the planned one
        self._gaps: list[float] = []  # seconds of each decode step, by its number
        self._planned = 0  # decode steps
        self._owed = -BURST * PAUSE  # seconds of steps without prompts; see ItlTarget
        self._expected = 0  # requests that decode here later
        self._arriving = 0  # of these, those whose last chunk a peer computes, or that move
        self._for_peers = 0
        self._kv = 0  # tokens
        self._context = 0  # tokens, of the sequences that decode
        self._prompt_seconds = 0.0
        self._share = PromptShare(0.0)

    # ------------------------------------------------------------ requests

    def expect(self, job: Job) -> None:
        job.node = self
        self._expected += 1

    def arrives(self) -> None:
        """See ItlTarget."""
        self._arriving += 1

    def prefill(self, job: Job) -> None:
        self._for_peers += job.node is not self
        self._prompts.append(job)
        self._wake()

    def join(self, job: Job, tokens: int) -> None:
        """Decode a job whose KV has been read."""
        self._expected -= 1
        self._arriving -= 1
        self._kv += tokens
        self._joining.append(job)
        self._wake()

    def movable(self, router: int) -> list[Job]:
        done = len(self._gaps)
        jobs = [each for each in self.decoding if each.router == router and each.joined < done and each.due > done + 2]
        return sorted(jobs, key=lambda job: (job.decoded + done - job.joined, job.at))

    def move(self, job: Job, target: SimulatedNode) -> None:
        """Hand a decoding job over to another node."""
        done = len(self._gaps)  # tokens of steps in flight are dropped
        self._account(job, done)
        self.decoding.discard(job)
        job.last = self._events.now
        context = job.prompt + job.decoded
        self._context -= context + self._planned - done
        self._kv -= context
        target.expect(job)
        target.arrives()
        self._events.after(HANDOFF_SECONDS + self._lines.read.at(context), lambda: target.join(job, context))

    # ------------------------------------------------------------ reports

    @property
    def costs(self) -> StepCosts:
        """The costs as the node measures them: decodes have the contexts of its sequences."""
        context = self._context / len(self.decoding) if self.decoding else _TYPICAL_CONTEXT
        line = self._lines.decode
        decode = LinearCost(line.base, line.slope + self._costs.context * context)
        return msgspec.structs.replace(self._lines, decode=decode)

    @property
    def itl_target(self) -> float:
        if self._itl_target is not None:
            return self._itl_target
        decode = self.costs.decode
        return auto_itl_target(decode.at(1), decode.at(max(1, len(self.decoding))))

    @property
    def prompt_share(self) -> float:
        return self._share.update(self._prompt_seconds, self._events.now)

    def report(self) -> RequestLoad:
        decoding = len(self.decoding) + len(self._joining)
        return RequestLoad(
            requests=decoding + self._expected + self._for_peers,
            backlog=sum(job.prompt - job.computed for job in self._prompts),
            free_blocks=max(0, KV_TOKENS - self._kv) // BLOCK,
            total_blocks=KV_TOKENS // BLOCK,
            decoding=decoding,
            for_peers=self._for_peers,
            prompt_share=self.prompt_share,
            itl_target=self.itl_target,
        )

    # ------------------------------------------------------------ steps

    def _wake(self) -> None:
        if len(self._steps) < 2 and (step := self._plan()) is not None:
            self._steps.append(step)
            if len(self._steps) == 1:
                self._start(step)

    def _start(self, step: _Step) -> None:
        self._events.after(step.seconds, self._end_step)
        self._wake()

    def _plan(self) -> _Step | None:
        joined, self._joining = self._joining, []
        decodes = len(self.decoding) + len(joined)
        self._context += sum(job.prompt + job.decoded for job in joined)
        base = self._lines.decode.at(decodes) + self._costs.context * self._context
        done, tokens = self._plan_prompts(self._room(decodes, base, bool(joined)))
        added = max(0.0, self._lines.prompt.at(tokens) - self._lines.decode.base) if tokens else 0.0
        if tokens and decodes:
            self._owed += added * PAUSE
        elif decodes:
            self._owed = max(-BURST * PAUSE, self._owed - base)
        if not decodes and not tokens:
            return None
        self._context += decodes
        self._planned += decodes > 0
        for job in joined:
            job.joined, job.due = self._planned, self._planned + job.output - 2 - job.decoded
            self.decoding.add(job)
            heapq.heappush(self._due, (job.due, next(self._order), job))
        ended = list(self._take_due())
        self._joining += [job for job in done if job.node is self and job.output > 1]
        self._expected -= sum(job.node is self for job in done)
        return _Step(base + added, added if decodes else base + added, decodes, done, joined, ended)

    def _room(self, decodes: int, seconds: float, joins: bool) -> int:
        """Return the prompt tokens that fit into a step whose decodes alone take ``seconds``."""
        if not decodes or self._itl_target == 0.0:
            return _FULL_STEP
        waiting = sum(not job.computed for job in self._prompts)
        if len(self._prompts) >= MANY_PROMPTS:
            self._owed = min(self._owed, 0.0)
        if (joins and waiting <= decodes) or self._owed >= seconds:
            return 0
        hidden = self._lines.decode.base - self._lines.prompt.base  # the read of the weights
        share = ARRIVAL if self._arriving and len(self._prompts) < 2 * MANY_PROMPTS else 1.0
        return int((max(self.itl_target - seconds, seconds) * share + hidden) / self._lines.prompt.slope)

    def _plan_prompts(self, room: int) -> tuple[list[Job], int]:
        done, tokens = list[Job](), 0
        while self._prompts and tokens < room:
            job = self._prompts[0]
            if not job.computed:
                if self._kv + job.prompt > KV_TOKENS or len(self.decoding) + len(done) >= _MAX_SEQS:
                    break
                self._kv += job.prompt
            part = min(room - tokens, job.prompt - job.computed)
            job.computed += part
            tokens += part
            if job.computed == job.prompt:
                done.append(self._prompts.popleft())
                if job.node is not None and job.node is not self:
                    job.node.arrives()
        return done, tokens

    def _take_due(self) -> Iterator[Job]:
        while self._due and self._due[0][0] <= self._planned:
            due, _, job = heapq.heappop(self._due)
            if job.due == due and job in self.decoding:  # else it has moved
                self.decoding.discard(job)
                self._context -= job.prompt + job.output - 1
                yield job

    def _end_step(self) -> None:
        step, now = self._steps.popleft(), self._events.now
        if step.decodes:
            self._gaps.append(step.seconds)
            self._kv += step.decodes
        self._prompt_seconds += step.prompt_seconds
        for job in step.joined:
            job.longest_gap = max(job.longest_gap, now - job.last)
        for job in step.ended:
            self._account(job, job.due)
            self._kv -= job.prompt + job.output - 1
            self._end(job, now)
        for job in step.prompts_done:
            self._first_token(job)
        if self._steps:
            self._start(self._steps[0])
        else:
            self._wake()

    def _account(self, job: Job, until: int) -> None:
        """Add what the job has decoded here until that step."""
        job.longest_gap = max(job.longest_gap, max(self._gaps[job.joined : until], default=0.0))
        job.decoded += until - job.joined + 1

    def _first_token(self, job: Job) -> None:
        target = job.node
        assert target is not None
        job.first = job.last = self._events.now + _FIRST_TOKEN * (target is not self)
        if target is not self:
            self._for_peers -= 1
            rest = HANDOFF_SECONDS + self._lines.read.at(min(job.prompt, _FULL_STEP))
            self._events.after(rest, lambda: self._hand_over(job, target))
        elif job.output == 1:
            self._kv -= job.prompt
            self._end(job, job.first)

    def _hand_over(self, job: Job, target: SimulatedNode) -> None:
        self._kv -= job.prompt
        if job.output > 1:
            target.join(job, job.prompt)
        else:
            target._expected -= 1
            target._arriving -= 1
            self._end(job, job.first)
        self._wake()

    def _end(self, job: Job, at: float) -> None:
        job.end = at
        self._on_end(job)
