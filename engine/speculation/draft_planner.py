"""Drafts: guesses of next tokens, which a decode verifies beside its newest token (docs/speculation.md).

They come from a ``DraftSource`` of the engine, or a simulated runner makes them. A source reads the tokens so far, or
what the model has predicted behind the last step, so the engine waits for them:

    step        t d1 d2 d3        t: the newest token
    applied     s1 s2 s3          d1 and d2 were right
    next step   s3 e1 e2 e3       planned now, and not while the step was in flight

While no drafts are worth that, steps are planned while others are in flight, as without drafts. A simulated runner
knows the tokens itself; then the next step is planned while this one is in flight.

The model predicts only behind steps whose plan asks for it (``StepPlan.drafts_ahead``).
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec

from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.scheduler.drafting import Drafting
from engine.scheduler.microbatch import StepSequences
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.scheduler.step_builder import StepBuilder
from engine.sequence import Sequence
from engine.speculation.acceptance import Acceptance
from engine.speculation.draft_source import DraftSource, ModelDrafts
from engine.speculation.sequence_drafts import PlannedDrafts
from engine.step_cost_meter import StepCostMeter
from pdserve.ipc.messages import Drafted, EventBatch, Totals
from pdserve.records import Drafts, ScheduledSequence, StepOutput, StepPlan

_MANY = 1 << 30
_GROWTH = 4  # times the drafts that were measured in one step
_GAP_SHARE = 0.05  # weight of the latest gap
_ASK_EVERY = 64  # steps after which the model predicts again, to find out whether its drafts would be right


class DraftOptions(NamedTuple):
    """Each sequence gets a source of drafts; without sources a simulated runner drafts."""

    make_source: Callable[[], DraftSource] | None = None
    always: bool = False  # also drafts that are not worth their time
    synthetic: float | None = None  # probability that a draft is accepted, whatever is sampled; for benchmarks


class DraftPlanner(Drafting):
    """Decides how many drafts each decode has, and which.

    Let n sequences decode in t seconds, c be the seconds that a draft adds to a step, and p the probability that it is
    accepted. It is worth its time if p / c exceeds n / t, the tokens per second without it. All of a step's drafts
    together also have to make up for the other costs of a step with drafts, and for the time in which the device waits
    for the host before it. The costs are measured (engine/step_cost_meter.py), p follows from each sequence's recent
    drafts (acceptance.py). There are no drafts before a step without drafts has been measured.
    A step has at most the drafts of one sequence, or four times as many as have been measured.
    """

    def __init__(
        self,
        options: DraftOptions,
        config: SchedulerConfig,
        kv: KVCacheManager,
        meter: StepCostMeter,
        totals: Totals,
        events: EventBatch,
    ) -> None:
        self._make_source, self._always, self._synthetic = options
        self._most = config.max_drafts
        self._random = random.Random(0)
        self._kv = kv
        self._meter = meter
        self._totals = totals
        self._events = events
        self._stages = config.stages
        self._by_model = self._make_source is ModelDrafts
        self._ahead = 0  # drafts that the model makes behind the latest step
        self._unasked = 0  # steps since it made some
        self._gap = _HostGap(totals)
        self._of_all = Acceptance(self._most, sure=self._by_model)
        if self._synthetic is not None:
            self._of_all.rate = self._synthetic
        self._least = 1.0  # probability of a draft that is worth its time
        self._num_drafts = 0  # drafts in the step being planned
        self._drafts: list[Drafts] = []  # drafts from sources, for the step being planned
        self._lengths: list[int] = []  # tokens of the decodes of the step being applied, before its own

    def must_wait(self, running: Collection[Sequence]) -> bool:
        """Whether no step is planned before the one in flight has ended, since drafts follow its tokens.

        All sequences wait then: two steps of some cost more than one of all. Pipeline stages compute others meanwhile.
        """
        if self._make_source is None or self._stages > 1:
            return False
        decodes = [sequence for sequence in running if sequence.decodes_here]
        if any(sequence.drafts.verifying and not sequence.blocked for sequence in running):
            return True
        if not any(sequence.in_flight for sequence in decodes) or (self._by_model and not self._ahead):
            return False
        if self._always:
            return any(map(self._waits, decodes))
        able = [_drafts_of(sequence).acceptance for sequence in decodes if _draft_limit(sequence, 1)]
        acceptances = [acceptance for acceptance in able if acceptance is not None]
        num_drafts = self._most * sum([acceptance.hits for acceptance in acceptances])
        expected = sum([acceptance.expected for acceptance in acceptances])
        return self._pays(len(decodes), expected, num_drafts, self._gap.seconds)

    def ready(self, running: Collection[Sequence]) -> Collection[Sequence]:
        """Return the sequences that may take part in the next step: all but those whose drafts follow a result."""
        if self._make_source is None or self._stages == 1:
            return running
        return [sequence for sequence in running if not self._waits(sequence)]

    def add_decodes(self, builder: StepBuilder, sequences: Collection[Sequence]) -> None:
        """Add decodes to a step, with drafts as far as blocks are free. A source drafts behind tokens on the host."""
        if self._make_source is None:
            for sequence in sequences:
                unmasked = sequence.constraint is None
                _drafts_of(sequence).use_own(_draft_limit(sequence, self._most) if unmasked else 0)
        else:
            self._draft(sequences, self._make_source)
        self._kv.grow_for_drafts(sequences, self._most - 1 if self._by_model else 0)
        builder.add_decodes(sequences, self._launch)
        builder.count_drafts(self._num_drafts, self._drafts)
        self._num_drafts = 0
        self._drafts = []

    def ahead(self, running: Collection[Sequence]) -> int:
        """Return how many drafts the model makes behind the step that is planned, for the one after it."""
        if not self._by_model:
            return 0
        able = [
            sequence for sequence in running if sequence.length > sequence.prompt_len and _draft_limit(sequence, 1) > 0
        ]
        expected = [(_drafts_of(sequence).acceptance or self._of_all).expected for sequence in able]
        pays = self._pays(len(able), sum(expected), self._most * len(able), self._gap.seconds)
        self._unasked += 1
        asks = bool(able) and (self._always or pays or self._unasked >= _ASK_EVERY)
        self._ahead = self._most if asks else 0
        self._unasked = 0 if asks else self._unasked
        return self._ahead

    def verified(self, step: StepSequences, plan: StepPlan, output: StepOutput) -> None:
        self._lengths = [len(sequence.token_ids) for sequence in step.decodes] if output.decode_counts else []
        if output.decode_counts:
            decodes = plan.scheduled[: plan.num_decodes]
            for sequence, item, count in zip(step.decodes, decodes, output.decode_counts, strict=True):
                assert 1 <= count <= item.num_tokens, f"a decode of {item.num_tokens} tokens yields {count}"
                sequence.reject_drafts(item.num_tokens - count)
        if plan.drafts:
            self._count_verified(step.decodes, plan, output)

    def count(self, step: StepSequences, plan: StepPlan, output: StepOutput) -> None:
        totals = self._totals
        drafted = self._events.drafted
        for sequence, before, item, count in zip(
            step.decodes, self._lengths, plan.scheduled, output.decode_counts, strict=False
        ):
            if item.num_tokens == 1:
                continue
            num_drafts = item.num_tokens - 1
            accepted = count - 1
            totals.spec_decode_num_drafts += 1
            totals.spec_decode_num_draft_tokens += num_drafts
            totals.spec_decode_num_accepted_tokens += accepted
            for position in range(accepted):
                totals.accepted_per_position[position] += 1
            taken = min(accepted, len(sequence.token_ids) - before)
            if taken or accepted < num_drafts:
                drafted.append(Drafted(sequence.rid, taken, num_drafts - accepted))

    def keep(self, step: StepSequences, output: StepOutput) -> None:
        if not self._by_model:
            return
        of_seq = {sequence.seq: sequence for sequence in (*step.decodes, *step.prompts)}
        for seq, drafts in output.drafts:
            sequence = of_seq[seq]
            if _may_draft(sequence):
                planned = _drafts_of(sequence)
                if planned.source is None:
                    self._begin(planned, ModelDrafts)
                assert isinstance(planned.source, ModelDrafts)
                planned.source.put(len(sequence.token_ids), drafts)

    def _count_verified(self, decodes: Collection[Sequence], plan: StepPlan, output: StepOutput) -> None:
        """Count what the decodes of an applied step have yielded, as far as their drafts came with its plan."""
        num_verified = {drafts.seq: len(drafts.token_ids) for drafts in plan.drafts if drafts.token_ids}
        at = 0
        for sequence, count in zip(decodes, output.decode_counts, strict=bool(num_verified)):
            if sequence.seq in num_verified:
                tokens = output.token_ids[at : at + count]
                _drafts_of(sequence).count_verified(num_verified[sequence.seq], tokens)
            at += count

    def _draft(self, sequences: Collection[Sequence], make_source: Callable[[], DraftSource]) -> None:
        """Let these decodes verify drafts if that is worth its time, else probe some."""
        step = self._meter.decode.at(len(sequences))
        self._least = least = self._meter.drafts.slope * len(sequences) / step if step else 1.0
        room = _MANY if self._always else max(self._most, _GROWTH * self._meter.most_drafts)
        gain = 0.0
        num_drafts = 0
        for sequence in sequences:
            drafts = _drafts_of(sequence)
            limit = _draft_limit(sequence, self._most)
            if limit <= 0:
                continue
            acceptance = drafts.acceptance or self._begin(drafts, make_source)
            worth = limit if self._always else acceptance.worth(least, limit)
            if worth and not sequence.in_flight and num_drafts + worth <= room:
                if sequence.constraint is not None and not sequence.constraint.fixed:
                    drafts.use(sequence.constraint.drafts[:worth])
                else:
                    drafts.use(drafts.propose(sequence.token_ids, worth))
                num_drafts += drafts.num_next
                gain += acceptance.gain(drafts.num_next)
            else:
                self._probe(sequence, drafts, acceptance)
        if num_drafts and not self._always and not self._pays(len(sequences), gain, num_drafts):
            for sequence in sequences:
                _drafts_of(sequence).use(())

    def propose(self, sequence: Sequence) -> tuple[int, ...]:
        """Return drafts of a sequence whose masks follow from them. The step may use fewer."""
        most = min(self._most, sequence.max_length - len(sequence.token_ids) - 1)
        if self._make_source is None or most <= 0 or not _may_draft(sequence):
            return ()
        drafts = _drafts_of(sequence)
        acceptance = drafts.acceptance or self._begin(drafts, self._make_source)
        if worth := most if self._always else acceptance.worth(self._least, most):
            return drafts.propose(sequence.token_ids, worth)
        self._probe(sequence, drafts, acceptance)
        return ()

    def _probe(self, sequence: Sequence, drafts: PlannedDrafts, acceptance: Acceptance) -> None:
        """Measure how often drafts would be right, if a probe is due; synthetic drafts need none."""
        if self._synthetic is None and acceptance.probe_due(len(sequence.token_ids)):
            drafts.probe(sequence.token_ids, self._most)

    def _begin(self, drafts: PlannedDrafts, make_source: Callable[[], DraftSource]) -> Acceptance:
        """Return the acceptance of a sequence, which has a source from now on."""
        acceptance = Acceptance(self._most, self._of_all, sure=self._by_model)
        drafts.begin(make_source(), acceptance)
        return acceptance

    def _pays(self, num_decodes: int, gain: float, num_drafts: float, gap: float = 0.0) -> bool:
        """Whether ``gain`` further tokens are worth the time of the drafts, and of a gap before the step."""
        return gain * self._meter.decode.at(num_decodes) > num_decodes * (gap + self._meter.drafts.at(num_drafts))

    def _waits(self, sequence: Sequence) -> bool:
        """Whether a step in flight verifies drafts, or samples a token that drafts will follow."""
        if not sequence.in_flight:
            return False
        return sequence.drafts.verifying or (sequence.decodes_here and _draft_limit(sequence, self._most) > 0)

    def _launch(self, sequence: Sequence, step: int) -> ScheduledSequence:
        """Launch a decode with as many of its drafts as fit into its blocks."""
        table = sequence.table
        planned = sequence.drafts
        assert isinstance(planned, PlannedDrafts)
        num_drafts = min(planned.num_next, min(table.capacity, table.covered) - sequence.length)
        if (drafts := planned.take(sequence.seq, num_drafts)) is not None:
            self._drafts.append(drafts if self._synthetic is None else self._with_synthetic(drafts, self._synthetic))
        self._num_drafts += num_drafts
        return sequence.launch_drafts(step, num_drafts) if num_drafts else sequence.launch_decode(step)

    def _with_synthetic(self, drafts: Drafts, rate: float) -> Drafts:
        accept = 0
        while accept < len(drafts.token_ids) and self._random.random() < rate:
            accept += 1
        return msgspec.structs.replace(drafts, accept=accept)


def _drafts_of(sequence: Sequence) -> PlannedDrafts:
    """Return the drafts of a sequence, which has some from now on."""
    drafts = sequence.drafts
    if not isinstance(drafts, PlannedDrafts):
        drafts = PlannedDrafts()
        sequence.draft_from(drafts)
    return drafts


def _may_draft(sequence: Sequence) -> bool:
    return not (sequence.request.sampling.disable_spec_decode or sequence.request.lacks_draft_kv)


def _draft_limit(sequence: Sequence, most: int) -> int:
    """Return how many drafts, up to ``most``, its next decode may have: no more tokens than its output may grow by.

    A masked sequence has the drafts that its masks cover. No draft passes the next snapshot of a recurrent state.
    """
    if not _may_draft(sequence):
        return 0
    if sequence.state is not None:
        most = min(most, sequence.state.draft_limit(sequence.num_launched))
    if sequence.constraint is not None and not sequence.constraint.fixed:
        most = min(most, len(sequence.constraint.drafts))
    return min(most, sequence.max_length - sequence.length - 1)


class SyntheticDrafts:
    """A DraftSource of benchmarks whose drafts are accepted at a given rate: the first tokens of the prompt."""

    def propose(self, token_ids: array[int], most: int) -> tuple[int, ...]:
        return tuple(token_ids[:most])


class _HostGap:
    """Host time between the end of a step and the launch of the next one that waits for it."""

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self._steps = 0
        self._host_seconds = 0.0
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """The mean of recent steps."""
        totals = self._totals
        if steps := totals.steps - self._steps:
            seconds = (totals.host_seconds - self._host_seconds) / steps
            self._seconds += (seconds - self._seconds) * (_GAP_SHARE if self._steps else 1.0)
            self._steps = totals.steps
            self._host_seconds = totals.host_seconds
        return self._seconds
