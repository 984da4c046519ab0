"""Decides what each step computes: prompt chunks and decodes under one token budget, on blocks it hands out.

A sequence's way:

    waiting ──admit──► running ──samples──► … ──► finished
       ▲   │              │
       │   │ handoff      └── preempted: no block left (recomputed later, from the prefix cache where possible)
       │   ▼
       │ reserved ──StartRead──► reading ──KVConfirmed──► running
       └────── PrefillLocally ──────┘

Everything here is plain Python over plain values: no device, no transfer, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from engine.blocks import BlockPool, Use
from engine.hashing import BlockHashes
from engine.messages import Batch, Leased, Mode, Output, ReadEnded, Refused, Reserved, StartRead, Status, Submit
from engine.report import Report, Totals
from engine.requests import Request, Sequence
from engine.transfers import Transfers
from pdserve.records import (
    FinishReason,
    KVConnectorOutput,
    ModelRunnerOutput,
    NewSequence,
    Sample,
    ScheduledSequence,
    StepPlan,
)
from pdserve.stopping import finish_reason


class Scheduler:
    """The state of all requests of one node. Commands change it between steps; ``plan`` and ``apply`` frame a step."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_batch_tokens: int,
        max_waiting: int,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_batch_tokens = max_batch_tokens
        self._max_waiting = max_waiting
        self._eos_token_ids = frozenset(eos_token_ids)
        self.pool = BlockPool(num_blocks)
        self.report = Report()
        self.totals = Totals()
        self.transfers = Transfers(self.pool)
        self._requests: dict[int, Request] = {}
        self._waiting: deque[Sequence] = deque()
        self._reserved: dict[int, Sequence] = {}  # by rid: blocks held, KV still to come from P
        self._running: dict[int, Sequence] = {}  # by seq, in order of admission
        self._forgotten: list[int] = []  # sequences the runner must drop
        self._next_seq = 1

    # ------------------------------------------------------------ commands

    def submit(self, message: Submit, prompt: list[int]) -> None:
        """Queue a request, or refuse it at once when the queue is full or it can never fit."""
        needed = self._blocks_for(len(prompt) + 1)
        if needed > self.pool.total:
            text = f"a prompt of {len(prompt)} tokens needs {needed} KV blocks, this node has {self.pool.total}"
            self.report.refused.append(Refused(message.rid, "RequestTooLong", text))
            return
        if len(self._waiting) >= self._max_waiting:
            text = f"{len(self._waiting)} requests are waiting, the limit is {self._max_waiting}; come back later"
            self.report.refused.append(Refused(message.rid, "Overloaded", text))
            return
        request = Request(
            message.rid, prompt, message.sampling, message.mode, message.cache_salt, skip_tokens=message.skip_tokens
        )
        self._requests[request.rid] = request
        self._waiting.append(self._new_sequence(request, 0, list(prompt)))

    def start_read(self, message: StartRead) -> None:
        """Order the read of a reserved request's missing blocks. An unknown rid (cancelled meanwhile) is ignored."""
        sequence = self._reserved.get(message.rid)
        if sequence is None or sequence.request.read_id is not None:
            return
        request = sequence.request
        request.first = message.first
        local = tuple(sequence.blocks[sequence.num_computed // self._block_size :])
        if len(local) != len(message.remote_blocks):
            text = f"the peer named {len(message.remote_blocks)} blocks where {len(local)} are missing"
            self.report.reads.append(ReadEnded(request.rid, text))
            return
        request.read_id = self.transfers.start_read(request.rid, message.epoch, local, message.remote_blocks)

    def kv_confirmed(self, rid: int) -> None:
        """The KV that was read is P's, unchanged: decode on it, from the second token."""
        sequence = self._reserved.pop(rid, None)
        if sequence is None:
            return
        request = sequence.request
        assert request.read_id is None, "a read was confirmed before it had ended"
        request.mode = Mode.LOCAL
        self._advance(sequence, sequence.prompt_len - sequence.num_computed)
        self._running[sequence.seq] = sequence
        self._set_first(sequence, request.first)
        self._branch(sequence)

    def prefill_locally(self, rid: int, first: tuple[Sample, ...]) -> None:
        """Give up the handoff: drop what was read and compute the prompt here, ahead of the queue."""
        sequence = self._reserved.pop(rid, None)
        if sequence is None:
            return
        request = sequence.request
        request.mode = Mode.LOCAL
        self._take_back_blocks(sequence)
        self._waiting.appendleft(sequence)
        if first or request.first:
            self._set_first(sequence, first or request.first)

    def cancel(self, rid: int) -> None:
        """Forget a request, or the lease that it has become. Unknown ones are ignored."""
        request = self._requests.get(rid)
        if request is None:
            self.free_lease(rid)
            return
        for sequence in list(request.sequences.values()):
            self._finish(sequence)

    def free_lease(self, rid: int) -> None:
        """No peer reads these blocks any more."""
        self.transfers.free_lease(rid)
        self.report.status_changed = True

    # ------------------------------------------------------------ a step

    @property
    def idle(self) -> bool:
        """True when ``plan`` would have nothing for the runner or the connector, now and until a command comes."""
        return not (
            self._running or self._forgotten or self.transfers.has_orders or (self._waiting and self._head_fits())
        )

    def plan(self) -> StepPlan:
        """The next step: every decode, then prompt chunks, within the token budget."""
        self._make_room_for_decodes()
        self._admit()
        new: list[NewSequence] = []
        scheduled: list[ScheduledSequence] = []
        budget = self._max_batch_tokens
        decodes = [s for s in self._running.values() if s.missing == 1]
        prompts = [s for s in self._running.values() if s.missing > 1]
        for sequence in decodes + prompts:
            num_tokens = min(sequence.missing, budget)
            if num_tokens == 0:
                break
            budget -= num_tokens
            scheduled.append(self._schedule(sequence, num_tokens, new))
        plan = StepPlan(
            step=self.totals.steps,
            finished=tuple(self._forgotten),
            new=tuple(new),
            scheduled=tuple(scheduled),
            connector=self.transfers.take_orders(),
        )
        self._forgotten.clear()
        return plan

    def apply(self, plan: StepPlan, output: ModelRunnerOutput) -> None:
        """Take in what the step produced."""
        samples = {o.seq: o.samples for o in output.step.outputs}
        for item in plan.scheduled:
            sequence = self._running[item.seq]
            self._advance(sequence, item.num_tokens)
            if item.num_samples:
                self._take_samples(sequence, samples[item.seq])
        self._apply_connector(output.connector)
        self.totals.steps += bool(plan.scheduled)

    def take_report(self) -> Batch | None:
        """What happened since it was last asked, as one message; None when nothing did."""
        if not self.report:
            return None
        report, self.report = self.report, Report()
        return report.batch(self.status())

    def status(self) -> Status:
        count, totals = self.pool.count, self.totals
        return Status(
            free=count(Use.FREE),
            held=count(Use.HELD),
            leased=count(Use.LEASED),
            quarantined=count(Use.QUARANTINED),
            total=self.pool.total,
            waiting=len(self._waiting),
            reading=len(self._reserved),
            running=len(self._running),
            steps=totals.steps,
            preemptions=totals.preemptions,
            recomputed_tokens=totals.recomputed_tokens,
            cached_tokens=totals.cached_tokens,
            prompt_tokens=totals.prompt_tokens,
            output_tokens=totals.output_tokens,
        )

    # ------------------------------------------------------------ planning

    def _make_room_for_decodes(self) -> None:
        """A block for every running sequence's next token; the latest admitted make way when there are too few."""
        for sequence in list(self._running.values()):
            if sequence.seq not in self._running:
                continue
            while len(sequence.blocks) < self._blocks_for(len(sequence.token_ids)):
                blocks = self.pool.take(1, after=sequence.blocks[-1])
                if blocks is not None:
                    sequence.blocks += blocks
                    continue
                victim = self._running[next(reversed(self._running))]
                self._preempt(victim)
                if victim is sequence:
                    break

    def _preempt(self, sequence: Sequence) -> None:
        del self._running[sequence.seq]
        self.totals.preemptions += 1
        self.totals.recomputed_tokens += sequence.num_computed
        self._forget_in_runner(sequence)
        self._take_back_blocks(sequence)
        self._waiting.appendleft(sequence)

    def _admit(self) -> None:
        """Give blocks to waiting sequences in their order, while there is room."""
        budget = self._max_batch_tokens - sum(min(s.missing, self._max_batch_tokens) for s in self._running.values())
        while self._waiting and budget > 0 and len(self._running) + len(self._reserved) < self._max_num_seqs:
            sequence = self._waiting[0]
            if not self._allocate(sequence):
                return
            self._waiting.popleft()
            request = sequence.request
            if request.mode is Mode.HANDOFF:
                self._reserved[request.rid] = sequence
                self.report.reserved.append(Reserved(request.rid, sequence.num_computed))
                continue
            self._running[sequence.seq] = sequence
            budget -= sequence.missing

    def _head_fits(self) -> bool:
        """Whether the first waiting sequence would get its blocks if they were asked for now."""
        sequence = self._waiting[0]
        cached = self._cached_blocks(sequence)
        wanted = self._blocks_for(len(sequence.token_ids)) - len(cached)
        return wanted <= self.pool.count(Use.FREE) - self.pool.count_free(cached)

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """Blocks of its cached prefix. The last token is always computed: its logits are needed."""
        return self.pool.match(sequence.hashes.upto(sequence.token_ids, len(sequence.token_ids) - 1))

    def _allocate(self, sequence: Sequence) -> bool:
        """Blocks for all tokens it has: cached ones first, then adjacent ones."""
        if not self._head_fits():
            return False
        cached = self._cached_blocks(sequence)
        self.pool.hold(cached)
        fresh = self.pool.take(
            self._blocks_for(len(sequence.token_ids)) - len(cached), after=cached[-1] if cached else None
        )
        assert fresh is not None
        sequence.blocks = cached + fresh
        sequence.num_computed = len(cached) * self._block_size
        sequence.remembered = len(cached)
        request = sequence.request
        if request.cached_tokens is None:
            request.cached_tokens = sequence.num_computed
            self.totals.cached_tokens += sequence.num_computed
            self.totals.prompt_tokens += sequence.prompt_len
        return True

    def _schedule(self, sequence: Sequence, num_tokens: int, new: list[NewSequence]) -> ScheduledSequence:
        if sequence.known_blocks < 0:
            new.append(sequence.introduction())
            sequence.known_blocks = len(sequence.blocks)
        item = ScheduledSequence(
            seq=sequence.seq,
            num_tokens=num_tokens,
            num_samples=sequence.samples_due if num_tokens == sequence.missing else 0,
            new_block_ids=tuple(sequence.blocks[sequence.known_blocks :]),
        )
        sequence.known_blocks = len(sequence.blocks)
        return item

    # ------------------------------------------------------------ results

    def _advance(self, sequence: Sequence, num_tokens: int) -> None:
        """The KV of ``num_tokens`` more tokens is there; full blocks become findable."""
        sequence.num_computed += num_tokens
        hashes = sequence.hashes.upto(sequence.token_ids, sequence.num_computed)
        for index in range(sequence.remembered, len(hashes)):
            self.pool.remember(hashes[index], sequence.blocks[index])
        sequence.remembered = len(hashes)

    def _take_samples(self, sequence: Sequence, samples: tuple[Sample, ...]) -> None:
        request = sequence.request
        if request.mode is Mode.LEASE:
            self._lease(sequence, samples)
            return
        if sequence.num_outputs == 0:
            for choice, sample in enumerate(samples[1:], start=1):
                if self._emit(request, choice, sample, 1) is None:
                    request.branches[choice] = sample.token_id
        self._branch(sequence)
        sequence.token_ids.append(samples[0].token_id)
        if self._emit(request, sequence.choice, samples[0], sequence.num_outputs) is not None:
            self._finish(sequence)

    def _emit(self, request: Request, choice: int, sample: Sample, num_outputs: int) -> FinishReason | None:
        reason = finish_reason(sample.token_id, num_outputs, request.sampling, self._eos_token_ids)
        cached = request.cached_tokens or 0 if num_outputs == 1 else 0
        self.report.outputs.append(Output(request.rid, choice, sample, reason, cached))
        self.totals.output_tokens += 1
        return reason

    def _set_first(self, sequence: Sequence, first: tuple[Sample, ...]) -> None:
        """Take over first tokens that P has sampled. The first choice that goes on leads; the others branch off it."""
        request = sequence.request
        live = {
            choice: sample.token_id
            for choice, sample in enumerate(first)
            if finish_reason(sample.token_id, 1, request.sampling, self._eos_token_ids) is None
        }
        if not live:
            self._finish(sequence)
            return
        del request.sequences[sequence.choice]
        sequence.choice = min(live)
        request.sequences[sequence.choice] = sequence
        sequence.token_ids.append(live.pop(sequence.choice))
        request.branches = live

    def _branch(self, sequence: Sequence) -> None:
        """The prompt's KV is there: start the choices that share it.

        A branch waits like a preempted sequence. It finds the prompt's full blocks in the prefix cache and computes the
        rest of the last one again (less than a block), so blocks are shared without ever being copied.
        """
        request = sequence.request
        digests = sequence.hashes.upto(sequence.token_ids, sequence.prompt_len)
        branches = [
            self._new_sequence(request, choice, [*request.prompt, token_id], digests)
            for choice, token_id in request.branches.items()
        ]
        request.branches = {}
        self._waiting.extendleft(reversed(branches))

    def _lease(self, sequence: Sequence, samples: tuple[Sample, ...]) -> None:
        """P has done its part: keep the blocks the peer lacks for it, and say so together with the first tokens."""
        request = sequence.request
        for choice, sample in enumerate(samples):
            self.report.outputs.append(Output(request.rid, choice, sample, None, request.cached_tokens or 0))
            self.totals.output_tokens += 1
        leased = sequence.blocks[request.skip_tokens // self._block_size :]
        sequence.blocks = sequence.blocks[: len(sequence.blocks) - len(leased)]
        self.transfers.lease(request.rid, leased)
        self.report.leased.append(Leased(request.rid, tuple(leased), sequence.prompt_len))
        self._finish(sequence)

    def _apply_connector(self, output: KVConnectorOutput) -> None:
        for result in output.finished_recving:
            rid = self.transfers.ended(result.read_id)
            if rid is None:
                self.report.status_changed = True
                continue
            self._requests[rid].read_id = None
            self.report.reads.append(
                ReadEnded(rid, result.error, result.num_bytes, result.num_descriptors, result.seconds)
            )
        self.report.connected += output.connected
        self.report.failed_peers += output.failed_peers

    # ------------------------------------------------------------ endings

    def _finish(self, sequence: Sequence) -> None:
        """Remove a sequence from wherever it is, and its request with the last one."""
        request = sequence.request
        if self._running.pop(sequence.seq, None) is not None:
            self._forget_in_runner(sequence)
        elif self._reserved.pop(request.rid, None) is None:
            self._waiting.remove(sequence)
        self._take_back_blocks(sequence)
        del request.sequences[sequence.choice]
        if not request.sequences:
            del self._requests[request.rid]

    def _take_back_blocks(self, sequence: Sequence) -> None:
        """Its blocks are free again, but for those a transfer may still write to."""
        blocks: Iterable[int] = sequence.blocks
        request = sequence.request
        if request.read_id is not None:
            quarantined = set(self.transfers.abandon(request.read_id))
            request.read_id = None
            blocks = [block for block in sequence.blocks if block not in quarantined]
        self.pool.drop(list(blocks), Use.HELD)
        self.report.status_changed = True
        sequence.blocks = []
        sequence.num_computed = sequence.remembered = 0

    def _forget_in_runner(self, sequence: Sequence) -> None:
        if sequence.known_blocks >= 0:
            self._forgotten.append(sequence.seq)
            sequence.known_blocks = -1

    def _new_sequence(
        self, request: Request, choice: int, token_ids: list[int], digests: Collection[bytes] = ()
    ) -> Sequence:
        hashes = BlockHashes(self._block_size, request.cache_salt, tuple(digests))
        sequence = Sequence(self._next_seq, request, choice, token_ids, hashes)
        self._next_seq += 1
        request.sequences[choice] = sequence
        return sequence

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
