"""Decides what each step computes: prompt chunks and decodes under one token budget, on blocks of the block pool.

The states of a sequence:

    waiting ──admit──► running ──samples──► … ──► ended ──last step in flight applied──► blocks free
       ▲   │              │
       │   │ handoff      └── preempted: no free block (recomputed later, from the prefix cache where possible)
       │   ▼
       │ loading ──StartRead…──► reading ──KVConfirmed──► running (after a pull it computes the rest)
       └────── PrefillLocally ──────┘      (meanwhile steps may compute its first tokens: loads.py)

    waiting, running ──Pause──► paused ──Resume──► waiting: blocks are kept, unless they run out

Steps may be planned while earlier ones are in flight and their tokens unknown. A step writes KV into the blocks of all
its sequences until it has been applied. So the blocks of a sequence that ended meanwhile stay held until then.

The scheduler is plain Python over plain values: no device, no transfer. How long chunks of prompts are follows from the
durations of earlier steps, which ``apply`` takes, and from when streams of handoffs come, by ``clock``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection
from itertools import chain, islice
from math import isfinite

import msgspec

from engine.adapters.adapters import AdaptersFactory, no_adapters
from engine.grammars.constraints import GrammarConstraints
from engine.grammars.workers import GrammarWorkers
from engine.images.image_steps import ImagesFactory, no_images
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.cache_parts import CacheParts
from engine.kv_cache.connector_scheduler import ConnectorFactory, KVConnectorScheduler
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.kv_cache.states import States
from engine.recurrent.state_slots import StateSlots
from engine.request import Request
from engine.scheduler.choices import ChoiceManager
from engine.scheduler.drafting import DraftingFactory, no_drafting
from engine.scheduler.fair_share import FairShare
from engine.scheduler.itl_target import ItlTarget, JoiningStreams, in_order
from engine.scheduler.live_sequences import LiveSequences, OpenRequests
from engine.scheduler.loads import KVLoads
from engine.scheduler.microbatch import RunnableSequences, StepsInFlight
from engine.scheduler.peer_prompts import PeerPrompts
from engine.scheduler.refusals import Refusals
from engine.scheduler.room import Room
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.scheduler.step_builder import CROWDING_FRACTION, StepBuilder
from engine.scheduler.step_results import Emit, StepResults, no_emit
from engine.scheduler.ttft_target import NO_ORDER, PromptOrder, TtftTarget
from engine.sequence import Sequence
from engine.step_cost_meter import StepCostMeter
from pdserve.ipc.messages import EventBatch, LastChunk, Status, Submit, Totals
from pdserve.records import ModelRunnerOutput, StepPlan

_LOOKUPS_PER_STEP = 8  # waiting prompts that are looked up in the prefix cache while the device computes


class Scheduler:
    """The state of all requests of one node. Commands change it between steps; ``plan`` and ``apply`` frame a step.

    Steps are applied in the order in which they were planned. ``clock`` returns seconds.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        connector: ConnectorFactory = KVConnectorScheduler,
        drafting: DraftingFactory = no_drafting,
        images: ImagesFactory = no_images,
        adapters: AdaptersFactory = no_adapters,
        grammars: GrammarWorkers | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        decode = 1 + config.max_drafts  # tokens
        assert config.max_num_seqs * decode <= config.max_batch_tokens, "a step must have room for every sequence"
        self._config = config
        self._clock = clock
        self.pool = BlockPool(config.num_blocks, config.block_size, config.groups)
        self.events = EventBatch()
        self.totals = Totals(accepted_per_position=[0] * config.max_drafts)
        self.meter = StepCostMeter()
        self.states = StateSlots(config.num_state_slots, config.block_size) if config.num_state_slots else States()
        parts = CacheParts(self.pool, self.events, config.block_size, self.states, self.meter, self.totals, clock)
        self.connector = connector(parts)
        sizes = config.block_size, config.max_batch_tokens
        self._kv = KVCacheManager(self.pool, self.connector, *sizes, self.states, config.whole_images)
        self.images = images(self.totals)
        self._drafting = drafting(config, self._kv, self.meter, self.totals, self.events)
        self._constraints = GrammarConstraints(
            grammars, config.vocab_size, config.eos_token_ids, propose=self._drafting.propose
        )
        self._choices = ChoiceManager(config.block_size, config.eos_token_ids, self._constraints, self.events)
        self._live = LiveSequences(self._kv, self.events)
        self._in_flight = StepsInFlight(config.stages)
        users = OpenRequests(self._live, self._in_flight, self._constraints)
        self.adapters = adapters(users, self.events, clock)
        self.room = Room(
            self._live,
            self._kv,
            self.connector,
            self.events,
            self.totals,
            adapters=self.adapters,
            max_num_seqs=config.max_num_seqs,
            clock=clock,
        )
        self._refusals = Refusals(self._live, self.images, self.adapters, self.events, config.max_waiting, self.cancel)
        self._peer_prompts = PeerPrompts(self._live, self._kv, self.room, self.events)
        self._fair_share = FairShare(self._live, self.room, self.totals)
        self._joining = JoiningStreams(self.connector.peers, clock)
        self._itl_target = ItlTarget(
            self.meter,
            config.itl_target,
            stages=config.stages,
            block_size=config.block_size,
            first_chunk=max(1, int(config.full_step * CROWDING_FRACTION)),
            idle_step=config.idle_step,
        )
        self._ttft_target = TtftTarget(self.meter, self._itl_target, self.images, config.ttft_target)
        self._results = StepResults(
            in_flight=self._in_flight,
            live=self._live,
            kv=self._kv,
            choices=self._choices,
            connector=self.connector,
            events=self.events,
            totals=self.totals,
            meter=self.meter,
            drafting=self._drafting,
            images=self.images,
        )
        self.loads = KVLoads(
            self._live, self._kv, self.connector.peers, self._choices, branch=self._results.branch, clock=clock
        )
        self._prompts: list[Sequence] = []  # running and incomplete when the latest step was planned
        self._num_plans = 0
        self._busy = 0.0  # seconds until the device can begin the step that is planned
        self.expected = 0.0  # seconds that the latest plan takes; inf if unknown

    # ------------------------------------------------------------ commands

    def submit(self, message: Submit) -> None:
        """Queue a request, or refuse it at once if it can never fit, or if it has no output and the queue is full."""
        values = msgspec.structs.asdict(message)
        branches = {choice: array("I", output) for choice, output in values.pop("resume").items()}
        now = self._clock()
        request = Request(arrived=now - values.pop("age"), **values, branches=branches, waits_since=now)
        longest_output = max(map(len, branches.values()), default=0)
        if self._refusals.lacks_adapter(request):
            return
        needed = self._kv.blocks_for(request.prompt_len + longest_output + 1)
        if self._refusals.never_fits(request, needed, self.pool.total):
            return
        if not branches and self._refusals.overloaded(request, self._num_waiting):
            return
        if not self._constraints.holds(request):
            self._live.queue(self._choices.lead_sequence(request))

    def cancel(self, rid: int) -> None:
        """Drop a request; its leased blocks stay leased. Unknown rids are ignored."""
        self._constraints.forget(rid)
        for sequence in self._live.of_request(rid):
            self._live.finish(sequence)
        self.events.status_changed = True  # also for a request that waited for its grammar

    def pause(self, rid: int) -> None:
        """Leave a request out of steps until ``resume``. Unknown rids are ignored."""
        request = self._live.requests.get(rid) or self._constraints.held(rid)
        if request is not None and not request.paused:
            self._live.pause(request)

    def resume(self, rid: int) -> None:
        """Queue a paused request. Others and unknown rids are ignored."""
        request = self._live.requests.get(rid) or self._constraints.held(rid)
        if request is not None and request.paused:
            self._live.resume(request, self._clock())

    def free_lease(self, rid: int) -> None:
        """Drop a request and the lease on its blocks."""
        self.cancel(rid)
        self.connector.free_lease(rid)

    def forget_cached(self) -> None:
        """Empty the caches of KV and images, since other weights compute others. No request may be open."""
        self._kv.forget_cached()
        self.images.forget()
        self.events.status_changed = True

    def suspects(self, planning: bool) -> set[int]:
        """Return the requests that an exception may come from, while a step is planned or later."""
        computed = {sequence.rid for sequence in self._in_flight.suspects}
        return set(self._live.requests) if planning or not computed else computed

    # ------------------------------------------------------------ a step

    @property
    def idle(self) -> bool:
        """True if ``plan`` has nothing for the runner or the connector until a command, mask or result arrives."""
        if self._live.finished or self.connector.has_orders or self.adapters.has_orders or self._live.any_runnable:
            return False
        return self.room.head is None or not self.room.may_have_blocks(self.room.head)

    def plan(self, busy: float = 0.0) -> StepPlan:
        """Plan the next step: decodes, then prompts one after the other, within the token budget.

        ``busy``: seconds until the device can begin it.
        """
        self._take_grammar_results()
        self.adapters.begin()
        self._busy = busy
        self._num_plans += 1
        builder = StepBuilder(
            self._num_plans,
            self._config.max_batch_tokens,
            self._config.full_step,
            tile=self._config.tile,
            images=self.images,
            crowding=self._fair_share.crowding,
        )
        if self._fair_share.make_room(self._num_plans, bool(self._in_flight)) and self._add_running(builder):
            self.room.admit_loads()
            has_room = self._admit(builder) and self.room.free_places > 0
            if self._live.streams_loading and self._live.for_peers and not (has_room or self.connector.peers.revoking):
                self._refusals.for_peers(sequence for sequence in self._live.waiting if sequence.for_peer)
            self._refusals.without_slots()
        self._in_flight.add(self._num_plans, builder.sequences())
        self.expected = self.meter.expected(builder.work)
        seconds = busy + self.expected
        for rid in self.connector.peers.take_last_chunks():
            self.events.last_chunks.append(LastChunk(rid, seconds if isfinite(seconds) else 0.0))
        finished = self._live.take_finished()
        states = self._kv.take_state_orders(self._num_plans)
        builder.drafts_ahead = self._drafting.ahead(self._live.running.values())
        digests = self.connector.take_digest_orders()
        plan = builder.plan(finished, digests, states, self.adapters.take_slots())
        self._refusals.end_plan()
        return plan

    def prepare(self) -> None:
        """Do work that would delay a later token now, while the device computes or KV is read."""
        loading = (self._live.loading[rid] for rid in self.connector.peers.take_started() if rid in self._live.loading)
        for sequence in chain(self._in_flight.newest_prompts, loading):
            self._kv.hash_prompt(sequence)
        for sequence in islice((s for s in self._live.waiting if s.table.cached_at_lookup < 0), _LOOKUPS_PER_STEP):
            self._kv.look_up(sequence)

    def apply(self, plan: StepPlan, output: ModelRunnerOutput, seconds: float = 0.0, emit: Emit = no_emit) -> None:
        """Apply the results of a step that took ``seconds``. ``emit`` is called early if a prompt has ended."""
        self._kv.applied(plan.step)
        self.adapters.update(output)
        self._results.apply(plan, output, seconds, emit)
        self.loads.join_splits()
        self._constraints.request_masks()

    def take_events(self, *, cache: bool = True) -> EventBatch | None:
        """Return new events, if there are any. Not ``cache``: changes of the prefix cache follow next time."""
        if not self.events:
            return None
        self.totals.sampled_tokens += len(self.events.outputs.rids)
        batch = self.events.take(self.status(), self.images.take_changes(), *self.connector.report.take(cache))
        self.events.status_changed = not cache  # so there is a next time
        return batch

    def status(self) -> Status:
        free, held, leased, quarantined = self.pool.counts
        adapters = self.adapters.in_use
        running = self._live.running
        prompts = sum(prompt.num_computed < prompt.prompt_len and prompt.seq in running for prompt in self._prompts)
        return Status(
            free=free,
            held=held,
            leased=leased,
            quarantined=quarantined,
            total=self.pool.total,
            waiting=self._num_waiting,
            reading=len(self._live.loading),
            running=len(running),
            totals=msgspec.structs.replace(self.totals),
            backlog=self._backlog(),
            costs=self.meter.costs(self.connector.peers.load_cost),
            paused=len(self._live.paused),
            decoding=len(running) - prompts,
            for_peers=self._live.for_peers,
            itl_target=self._itl_target.seconds,
            itl_limit=self._itl_target.limit,
            ttft_target=self._ttft_target.seconds,
            host_blocks=self.connector.tiers.host_blocks,
            disk_blocks=self.connector.tiers.disk_blocks,
            state_slots=self.states.pool.counts,
            running_adapters=adapters.running,
            waiting_adapters=adapters.waiting,
        )

    @property
    def _num_waiting(self) -> int:
        return len(self._live.waiting) + self._constraints.num_compiling

    def _backlog(self) -> int:
        """Count the prompt tokens to be computed here. Cached tokens of waiting prompts count until a lookup."""
        loadable = self.connector.peers.loadable
        missing = self.images.missing_work
        waiting = sum(missing(s, max(0, s.table.cached_at_lookup, loadable(s))) for s in self._live.waiting)
        return waiting + sum(missing(s, s.num_computed) for s in self._prompts if not s.ended)

    # ------------------------------------------------------------ planning

    def _take_grammar_results(self) -> None:
        """Queue the requests whose grammar was compiled, and refuse those whose grammar failed."""
        self._constraints.request_masks()
        ready, failed = self._constraints.take_results()
        for request in ready:
            self._live.queue(self._choices.lead_sequence(request))
        for rid, error in failed:
            self._refusals.failed(rid, error)

    def _add_running(self, builder: StepBuilder) -> bool:
        """Add running sequences: decodes, decode-ahead, then prompts as far as they fit.

        If blocks run out, take leases of pulls back, or else preempt. Return False while leases or steps in flight,
        which write to the blocks, must end first. Steps in flight must also end first if drafts follow their tokens.
        """
        if self._drafting.must_wait(self._live.running.values()):
            return False
        runnable = self._select()
        while not self._kv.grow(chain(runnable.decodes, runnable.prompts)):
            if self.connector.tiers.give_way() or self.room.preempt_paused():
                continue
            if self._peer_prompts.end_ahead(runnable.ahead):
                runnable = self._select()
                continue
            revoking = self.room.take_back((*runnable.decodes, *runnable.prompts))
            if revoking or self._in_flight or self.connector.tiers.copying:
                return False
            if (sequence := self._live.least_urgent) is not None:
                self.room.preempt(sequence)
            else:
                self._refusals.for_peers(self._live.newest_for_peers)
            runnable = self._select()
        self._prompts = []
        self.images.begin(self._num_plans, runnable.prompts)
        waited = self._joining.longest_wait(runnable, self._busy)  # no stream joins any more once it is in the step
        self._add_decodes(builder, runnable.decodes)
        if runnable.ahead:
            self._add_decodes(builder, self._peer_prompts.decode_ahead(runnable.ahead))
        order = self._limit_prompts(builder, runnable, waited)
        prompts = in_order(runnable.prompts, builder.budget, order.ranks)
        if runnable.prompts and self._live.waiting:
            own = {sequence.request.client for sequence in runnable.prompts}
            self._admit(
                builder,
                lambda head: (
                    ((head.request.urgent or head.request.client not in own) and builder.has_room_beside(head))
                    or order.passes(head, runnable.prompts)
                ),
            )
        self._prompts += runnable.prompts
        for sequence in prompts:
            if builder.room(sequence) > 0:
                self._add_prompt(builder, sequence)
        return True

    def _add_decodes(self, builder: StepBuilder, sequences: Collection[Sequence]) -> None:
        self._drafting.add_decodes(builder, sequences)
        self._kv.decoded(sequences)

    def _select(self) -> RunnableSequences:
        running = self._drafting.ready(self._live.running.values())
        if not self._live.loading:
            return self._in_flight.select(running)
        return self._in_flight.select(chain(running, self.loads.computable()))

    def _limit_prompts(self, builder: StepBuilder, runnable: RunnableSequences, waited: float | None) -> PromptOrder:
        """Limit the step's prompts if sequences decode. Return the order of new prompts, the waiting ones included."""
        if not runnable.prompts and self.room.head is None:
            return NO_ORDER
        decoding = sum(sequence.decodes_here for sequence in self._live.running.values())
        coming = int(self._live.streams_coming)  # a stream that comes must not wait for a whole step
        loadable = self.connector.peers.loadable
        lacks_slot = self.adapters.lacking()
        waiting = (other for other in self._live.waiting if not (loadable(other) or lacks_slot(other)))
        begin = self._clock() + self._busy
        order = self._ttft_target.order(runnable.prompts, waiting, begin, decoding or coming)
        self.room.advance(order.next_waiting)
        builder.budget = self._itl_target.budget(
            decoding=decoding or coming,
            waited=waited,
            arrival_in=self._joining.arrival_in(self._busy),
            longest=order.seconds,
        )
        return order

    def _admit(self, builder: StepBuilder, accepts: Callable[[Sequence], bool] = lambda head: True) -> bool:
        """Allocate blocks for waiting sequences in order, while there are some, and add them to the step.

        Return False if the next one lacks blocks, as one that loads does after ``admit_loads``.
        """
        while (sequence := self.room.head) is not None and accepts(sequence):
            if self.connector.peers.loadable(sequence):
                return False
            if not builder.room(sequence) > 0:
                return True
            if self.room.fetch(sequence):
                continue
            if not self.room.allocate(sequence):
                return False
            self.room.admit(sequence)
            if not sequence.num_outputs:
                sequence.request.queued += self._clock() - sequence.request.waits_since
            self._live.run(sequence)
            self._prompts.append(sequence)
            if not self._add_prompt(builder, sequence):
                return True
        return True

    def _add_prompt(self, builder: StepBuilder, sequence: Sequence) -> bool:
        """Add a chunk of a prompt. Return False if the prompt waits for an image, or is about to be refused."""
        if self._refusals.leaves_out(sequence):
            return False
        if self._kv.has_windows:
            self._kv.cover(sequence, builder.room(sequence))
        if not builder.has_prompts:
            builder.crowding = self._fair_share.take_prompt(sequence, self._num_plans)
        num_tokens = builder.add_prompt(sequence)
        if num_tokens:
            self._kv.launched(sequence, num_tokens)
            self.connector.peers.scheduled(sequence)
        return num_tokens > 0
