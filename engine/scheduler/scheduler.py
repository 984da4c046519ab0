"""Decides what each step computes: prompt chunks and decodes under one token budget, on blocks it hands out.

A sequence's way:

    waiting ──admit──► running ──samples──► … ──► ended ──last step in flight applied──► blocks free
       ▲   │              │
       │   │ handoff      └── preempted: no block left (recomputed later, from the prefix cache where possible)
       │   ▼
       │ reserved ──StartRead…──► reading ──KVConfirmed──► running
       └────── PrefillLocally ──────┘

Steps may be planned while earlier ones are in flight, their tokens unknown. A step writes KV into the blocks of all its
sequences until it has been applied, so the blocks of a sequence that has ended meanwhile stay held until then.

Everything here is plain Python over plain values: no device, no transfer; nothing is decided by the clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable
from itertools import chain, islice

import msgspec

from engine.ipc.event_batch import EventBatch
from engine.ipc.messages import Batch, Mode, Outputs, Scored, Status, Submit, Totals
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.connector_scheduler import NullConnectorScheduler
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.request import Request, Sequence
from engine.scheduler.choices import ChoiceManager
from engine.scheduler.grammar_constraints import GrammarConstraints
from engine.scheduler.grammar_workers import GrammarWorkers
from engine.scheduler.microbatch import StepSequences, StepsInFlight
from engine.scheduler.step_builder import StepBuilder
from engine.scheduler.waiting_queue import WaitingQueue
from engine.throughput_meter import ThroughputMeter
from pdserve.protocols import KVConnectorScheduler
from pdserve.records import ModelRunnerOutput, PromptLogprobs, Sample, ScheduledSequence, StepPlan

ConnectorFactory = Callable[[BlockPool, EventBatch, int], KVConnectorScheduler]  # the last is the block size

_LOOKS_PER_STEP = 8  # prompts in the queue that are looked up in the cache while the device computes


class Scheduler:
    """The state of all requests of one node. Commands change it between steps; ``plan`` and ``apply`` frame a step.

    Steps are applied in the order in which they were planned. ``full_step`` is explained at StepBuilder, ``stages`` are
    those of engine/scheduler/microbatch.py. By ``clock``, in seconds, it is told how long requests have waited.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_batch_tokens: int,
        full_step: int,
        max_waiting: int,
        stages: int = 1,
        eos_token_ids: Collection[int] = (),
        connector: ConnectorFactory = NullConnectorScheduler,
        grammars: GrammarWorkers | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        assert max_num_seqs <= max_batch_tokens, "a step must have room for a token of every running sequence"
        self._max_num_seqs = max_num_seqs
        self._max_batch_tokens = max_batch_tokens
        self._full_step = full_step
        self._max_waiting = max_waiting
        self._clock = clock
        self.pool = BlockPool(num_blocks)
        self.events = EventBatch()
        self.totals = Totals()
        self.meter = ThroughputMeter()
        self.connector = connector(self.pool, self.events, block_size)
        self._kv = KVCacheManager(self.pool, self.connector, block_size)
        self._constraints = GrammarConstraints(grammars, eos_token_ids)
        self._choices = ChoiceManager(block_size, eos_token_ids, self._constraints, self.events)
        self._requests: dict[int, Request] = {}
        self._waiting = WaitingQueue()
        self._loading: dict[int, Sequence] = {}  # by rid: blocks are held, the connector loads the prompt
        self._running: dict[int, Sequence] = {}  # by seq, in order of admission
        self._in_flight = StepsInFlight(stages)
        self._prompts: list[Sequence] = []  # that were being computed when the latest step was planned
        self._forgotten: list[int] = []  # sequences the runner must drop
        self._num_plans = 0

    # ------------------------------------------------------------ commands

    def submit(self, message: Submit) -> None:
        """Queue a request, or refuse it at once when the queue is full or it can never fit."""
        sampling, mode, salt = message.sampling, message.mode, message.cache_salt
        request = Request(
            *(message.rid, message.token_ids, sampling, mode, salt),
            *(message.priority, message.skip_tokens, message.ahead),
        )
        request.branches = {choice: array("I", output) for choice, output in message.resume.items()}
        longest_output = max(map(len, request.branches.values()), default=0)
        needed = self._kv.blocks_for(request.prompt_len + longest_output + 1)
        if needed > self.pool.total:
            text = f"a prompt of {request.prompt_len} tokens needs {needed} KV blocks, this node has {self.pool.total}"
            self.events.refuse(message.rid, "RequestTooLong", text)
            return
        num_waiting = len(self._waiting) + self._constraints.num_waiting
        if num_waiting >= self._max_waiting:
            text = f"{num_waiting} requests are waiting, the limit is {self._max_waiting}; come back later"
            self.events.refuse(message.rid, "Overloaded", text)
            return
        request.waits_since = self._clock()
        if not self._constraints.holds(request):
            self._queue(request)

    def kv_confirmed(self, rid: int, outputs: Outputs) -> None:
        """The KV that was read is P's, unchanged: decode on it, behind the tokens that P has sampled."""
        sequence = self._loading.pop(rid, None)
        if sequence is None:
            return
        request = sequence.request
        self.connector.finish_load(sequence)
        request.mode = Mode.LOCAL
        self._kv.received(sequence)
        self._running[sequence.seq] = sequence
        self._take_from_peer(sequence, outputs)
        self._branch(sequence)

    def prefill_locally(self, rid: int, outputs: Outputs) -> None:
        """Give up the handoff: drop what was read and compute the prompt here, ahead of the queue."""
        sequence = self._loading.pop(rid, None)
        if sequence is None:
            return
        request = sequence.request
        request.mode = Mode.LOCAL
        self._give_back(sequence)
        request.waits_since = self._clock()
        self._waiting.appendleft(sequence)
        if outputs:
            self._take_from_peer(sequence, outputs)

    def cancel(self, rid: int) -> None:
        """Forget a request; what was leased of it stays leased. Unknown ones are ignored."""
        self._constraints.forget(rid)
        request = self._requests.get(rid)
        for sequence in list(request.sequences.values()) if request is not None else ():
            self._finish(sequence)

    def free_lease(self, rid: int) -> None:
        """No peer reads these blocks any more, nor waits for what would follow."""
        self.cancel(rid)
        self.connector.free_lease(rid)
        self.events.status_changed = True

    # ------------------------------------------------------------ a step

    @property
    def idle(self) -> bool:
        """True when ``plan`` would have nothing for the runner or the connector, until a command or a result comes."""
        orders = self._forgotten or self.connector.has_orders
        runs = any(not sequence.blocked for sequence in self._running.values())
        return not (runs or orders or (self._head is not None and self._kv.fits(self._head)))

    def plan(self) -> StepPlan:
        """The next step: decodes, then prompts one after the other, within the token budget."""
        self._take_grammars()
        self._num_plans += 1
        draft = StepBuilder(self._num_plans, self._max_batch_tokens, self._full_step)
        if self._add_running(draft):
            self._admit(draft)
        self._in_flight.add(self._num_plans, draft.participants)
        finished, self._forgotten = tuple(self._forgotten), []
        return draft.plan(finished, self.connector.take_orders(), self.connector.take_digest_orders())

    def prepare(self) -> None:
        """Use the time while the device computes, or KV is read: work that would otherwise delay the next token."""
        loading = (self._loading[rid] for rid in self.connector.take_started() if rid in self._loading)
        for sequence in chain(self._in_flight.newest_prompts, loading):
            self._kv.prepare(sequence)
        for sequence in islice((s for s in self._waiting if s.expected < 0), _LOOKS_PER_STEP):
            self._kv.look(sequence)

    def apply(self, plan: StepPlan, output: ModelRunnerOutput, seconds: float = 0.0) -> None:
        """Take in what the step produced, and that it took so long."""
        self._take_scored(output.step.prompt_logprobs)
        if plan.scheduled:
            self._apply_step(plan.scheduled, output.step.samples, seconds)
            self.totals.steps += 1
            self.totals.step_seconds += seconds
        self.connector.update(output)
        self._constraints.request_masks()

    def take_events(self) -> Batch | None:
        """What happened since it was last asked, as one message; None when nothing did."""
        self.totals.sampled_tokens += self.events.num_outputs
        return self.events.take(self.status(), *self.connector.take_events()) if self.events else None

    def status(self) -> Status:
        num_waiting = len(self._waiting) + self._constraints.num_waiting
        requests = num_waiting, len(self._loading), len(self._running)
        totals = msgspec.structs.replace(self.totals)
        return Status(
            *self.pool.counts,
            self.pool.total,
            *requests,
            totals,
            self._backlog(),
            self.meter.throughput(self.connector.load_cost),
        )

    def _backlog(self) -> int:
        """Prompt tokens to be computed here; what is cached of those that wait is known once somebody has looked."""
        waiting = sum(s.prompt_len - max(0, s.expected) for s in self._waiting if s.request.mode is not Mode.HANDOFF)
        return waiting + sum(max(0, s.prompt_len - s.num_computed) for s in self._prompts if not s.ended)

    # ------------------------------------------------------------ planning

    def _take_grammars(self) -> None:
        """Go on with requests and sequences that have waited for what their grammar allows."""
        self._constraints.request_masks()
        ready, failed = self._constraints.take_results()
        for request in ready:
            self._queue(request)
        for rid, error in failed:
            self.events.refuse(rid, type(error).__name__, str(error))
            self.cancel(rid)

    def _queue(self, request: Request) -> None:
        self._requests[request.rid] = request
        self._waiting.append(self._choices.lead(request))

    def _add_running(self, draft: StepBuilder) -> bool:
        """Decodes, with a block for each one's token, then prompts; if there are none, those that go ahead of peers.

        Where blocks lack, the least urgent make way, and of these the latest admitted.

        False while they cannot make way, since steps in flight write to their blocks: let these steps end first.
        """
        runnable = self._in_flight.choose(self._running.values())
        while not self._kv.grow(chain(runnable.decodes, runnable.prompts)):
            if self._in_flight:
                return False
            # Not one that computes for a peer: what the peer was told of could not be freed.
            preemptible = [s for s in reversed(self._running.values()) if not s.for_peer]
            self._preempt(max(preemptible, key=lambda s: s.request.priority))  # the first of equals
            runnable = self._in_flight.choose(self._running.values())
        self._prompts = runnable.prompts
        if runnable.ahead:
            self._go_ahead(runnable)
        draft.add_running(runnable)
        return True

    def _go_ahead(self, runnable: StepSequences) -> None:
        """Decode for peers that have not taken over yet, or stop: where others need the device, or blocks lack."""
        going: list[Sequence] = []
        if not (runnable.prompts or self._waiting):
            going = [sequence for sequence in runnable.ahead if not self._in_flight.compute_prompts_besides(sequence)]
        if not self._kv.grow(going):
            going = []
        runnable.decodes.extend(going)
        for sequence in runnable.ahead:
            # Without outputs the end of its prompt is in flight, which the peer waits for.
            if sequence.num_outputs and sequence not in going:
                self._choices.stop_ahead(sequence)
                self._finish(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        del self._running[sequence.seq]
        self.totals.preemptions += 1
        self.totals.preempted_tokens += sequence.num_computed
        self._forget_in_runner(sequence)
        self._give_back(sequence)
        sequence.request.waits_since = self._clock()
        self._waiting.appendleft(sequence)

    @property
    def _head(self) -> Sequence | None:
        """Who is to be admitted next; None while nobody waits that could go on, or as many run as may."""
        seats = self._max_num_seqs - len(self._running) - len(self._loading)
        head = self._waiting.head if seats > 0 else None
        return None if head is None or head.blocked else head

    def _admit(self, draft: StepBuilder) -> None:
        """Give blocks to waiting sequences in their order, while there is room. Those of a handoff compute nothing."""
        while (sequence := self._head) is not None:
            request = sequence.request
            loads = self.connector.loadable(sequence) > 0
            if not (loads or draft.takes_prompts) or not self._kv.allocate(sequence):
                return
            self._waiting.remove(sequence)
            if request.cached_tokens is None:
                request.cached_tokens = sequence.num_computed
                self.totals.prefix_cached_tokens += sequence.num_computed
                self.totals.admitted_prompt_tokens += sequence.prompt_len
            if loads:
                self._loading[request.rid] = sequence
                self.connector.load(sequence)
            else:
                if not sequence.num_outputs:
                    request.queued += self._clock() - request.waits_since
                self._running[sequence.seq] = sequence
                draft.add_prompt(sequence)
                self._prompts.append(sequence)

    # ------------------------------------------------------------ results

    def _apply_step(
        self, scheduled: tuple[ScheduledSequence, ...], samples: tuple[Sample, ...], seconds: float
    ) -> None:
        """Take in the oldest step in flight."""
        step = self._in_flight.pop()
        for sequence, sample in step.decoded(samples):
            if self._add_computed(sequence, 1) and not self._choices.take(sequence, sample):
                self._finish(sequence)
        going_on, prompt_tokens = len(step.decodes), 0
        for sequence, num_tokens, drawn in step.computed(scheduled, samples):
            if sequence.num_computed < sequence.prompt_len:
                prompt_tokens += num_tokens
            else:  # what a peer has sampled for it
                going_on += 1
            if self._add_computed(sequence, num_tokens):
                self._apply_prompt(sequence, drawn)
        self.meter.add_step(going_on, prompt_tokens, seconds)

    def _take_scored(self, found: Iterable[tuple[int, PromptLogprobs]]) -> None:
        """Pass on log-probabilities of prompts, once: they count as told also when KV has to be computed anew."""
        for seq, logprobs in found:
            sequence = self._running.get(seq)
            if sequence is not None:  # else it was cancelled meanwhile
                sequence.request.num_scored = logprobs.end
                self.events.scored.append(Scored(sequence.request.rid, logprobs))

    def _add_computed(self, sequence: Sequence, num_tokens: int) -> bool:
        """The KV of ``num_tokens`` more tokens is there. Returns whether anybody still wants the sequence."""
        sequence.num_computed += num_tokens
        if sequence.ended:
            self._let_go(sequence)
            return False
        if sequence.num_computed >= sequence.full_at:
            self._kv.filled(sequence)
        return True

    def _apply_prompt(self, sequence: Sequence, samples: tuple[Sample, ...]) -> None:
        """More of a prompt is there; ``samples`` are empty unless this was its end."""
        goes_on = not samples or self._take_samples(sequence, samples)
        self.connector.computed(sequence)
        self._branch(sequence)
        if not goes_on:
            self._finish(sequence)

    def _take_samples(self, sequence: Sequence, samples: tuple[Sample, ...]) -> bool:
        """Returns whether the sequence goes on."""
        if sequence.for_peer:
            return self._choices.take_for_peer(sequence, samples)
        if sequence.num_outputs:  # it was preempted, or P has sampled its first token
            return self._choices.take(sequence, samples[0])
        return self._choices.take_first(sequence, samples)

    def _take_from_peer(self, sequence: Sequence, outputs: Outputs) -> None:
        resumed = sequence.num_outputs  # then it has its own
        if not resumed and not self._choices.take_from_peer(sequence, outputs):
            self._finish(sequence)

    def _branch(self, sequence: Sequence) -> None:
        """Let the choices in that wait for the prompt's KV, ahead of the queue, once it is there."""
        if sequence.request.branches and sequence.num_computed >= sequence.prompt_len:
            for branch in reversed(self._choices.branch(sequence)):
                self._waiting.appendleft(branch)

    # ------------------------------------------------------------ endings

    def _finish(self, sequence: Sequence) -> None:
        """Remove a sequence from wherever it is, and its request with the last one."""
        request = sequence.request
        if self._running.pop(sequence.seq, None) is not None:
            self._forget_in_runner(sequence)
        elif self._loading.pop(request.rid, None) is None:
            self._waiting.remove(sequence)
        sequence.ended = True
        self._let_go(sequence)
        del request.sequences[sequence.choice]
        if not request.sequences:
            del self._requests[request.rid]

    def _let_go(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that has ended, once no step in flight writes to them."""
        if not sequence.in_flight:
            self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self._kv.give_back(sequence)
        self.events.status_changed = True

    def _forget_in_runner(self, sequence: Sequence) -> None:
        if sequence.known_blocks >= 0:
            self._forgotten.append(sequence.seq)
            sequence.known_blocks = -1
