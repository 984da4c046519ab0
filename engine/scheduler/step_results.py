"""Applies the results of steps: counts the KV that they wrote, emits tokens, and ends sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.images.image_steps import ImageSteps
from engine.kv_cache.connector_scheduler import KVConnectorScheduler
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.scheduler.choices import ChoiceManager
from engine.scheduler.drafting import Drafting
from engine.scheduler.live_sequences import LiveSequences
from engine.scheduler.microbatch import StepsInFlight
from engine.sequence import Sequence
from engine.step_cost_meter import StepCostMeter, StepWork
from pdserve.ipc.messages import EventBatch, Pooled, Scored, Totals
from pdserve.logprobs import PromptLogprobs
from pdserve.records import ModelRunnerOutput, StepOutput, StepPlan

Emit = Callable[[], None]


def no_emit() -> None:
    """Leave all events for the next ``take_events``."""


class StepResults:
    """The part of the scheduler that takes results, in the order of the plans."""

    def __init__(
        self,
        *,
        in_flight: StepsInFlight,
        live: LiveSequences,
        kv: KVCacheManager,
        choices: ChoiceManager,
        connector: KVConnectorScheduler,
        events: EventBatch,
        totals: Totals,
        meter: StepCostMeter,
        drafting: Drafting,
        images: ImageSteps,
    ) -> None:
        self._in_flight = in_flight
        self._live = live
        self._kv = kv
        self._choices = choices
        self._connector = connector
        self._events = events
        self._totals = totals
        self._meter = meter
        self._drafting = drafting
        self._images = images

    def apply(self, plan: StepPlan, output: ModelRunnerOutput, seconds: float, emit: Emit) -> None:
        """Apply the results of a step that took ``seconds``.

        ``emit`` is called when the tokens are known and a prompt has ended: to cache and lease its blocks takes time.
        """
        self._apply_prompt_logprobs(output.step.prompt_logprobs)
        self._apply_pooled(output.step.pooled)
        self._connector.update(output)
        self._images.applied(plan.step)
        if plan.scheduled:
            self._apply_step(plan, output.step, seconds, emit)
            self._totals.steps += 1
            self._totals.step_seconds += seconds

    def _apply_step(self, plan: StepPlan, output: StepOutput, seconds: float, emit: Emit) -> None:
        """Apply the oldest step in flight."""
        step = self._in_flight.pop()
        self._drafting.verified(step, plan, output)
        for sequence, token_id, logprobs in step.decode_tokens(output):
            if sequence.count_computed(1) and not self._settle(sequence):
                continue
            if not self._choices.take_token(sequence, token_id, logprobs):
                self._live.finish(sequence)
        if output.decode_counts:
            self._drafting.count(step, plan, output)
        decodes = len(step.decodes)
        prompt_tokens = 0
        context = 0.0
        prompts: list[tuple[Sequence, bool, bool]] = []  # with: has filled a block, continues
        ends = 0  # prompts
        for sequence, num_tokens, sampled in step.prompt_tokens(plan, output):
            if sequence.num_computed < sequence.prompt_len:
                prompt_tokens += num_tokens
                context += num_tokens * (sequence.num_computed + num_tokens / 2)
            else:  # tokens that a peer has sampled for it
                decodes += 1
            settles = sequence.count_computed(num_tokens)
            if sequence.ended:
                self._live.free_unless_in_flight(sequence)
                continue
            continues = not sampled or self._choices.take_prompt_tokens(sequence, sampled)
            prompts.append((sequence, settles, continues))
            ends += bool(sampled)
        if ends:
            emit()
        for sequence, settles, continues in prompts:
            self._end_chunk(sequence, settles, continues)
        if output.drafts:
            self._drafting.keep(step, output)
        drafts = plan.num_drafts if output.decode_counts else 0
        work = StepWork(decodes, prompt_tokens, context / max(prompt_tokens, 1), drafts, self._images.work(plan))
        self._measure(work, seconds, ahead=plan.drafts_ahead > 0)

    def _measure(self, work: StepWork, seconds: float, ahead: bool) -> None:
        totals = self._totals
        decodes, prompt_tokens, context, drafts, images = work
        totals.prompt_seconds += self._meter.add_step(
            decodes, prompt_tokens, seconds, context, drafts, images, ahead=ahead
        )
        if decodes and prompt_tokens:
            totals.mixed_steps += 1
            totals.mixed_step_seconds += seconds
            totals.mixed_prompt_tokens += prompt_tokens

    def _apply_prompt_logprobs(self, scored: Iterable[tuple[int, PromptLogprobs]]) -> None:
        """Emit log-probabilities of prompts. They count as sent even if the KV has to be recomputed."""
        for seq, logprobs in scored:
            sequence = self._live.running.get(seq) or self._live.preemptible.get(seq)
            if sequence is not None:  # else it was cancelled meanwhile
                sequence.request.num_scored = logprobs.end
                self._events.scored.append(Scored(sequence.rid, logprobs))

    def _apply_pooled(self, pooled: Iterable[tuple[int, bytes]]) -> None:
        for seq, vector in pooled:
            sequence = self._live.running.get(seq)
            if sequence is not None:  # else it was cancelled meanwhile
                self._events.pooled.append(Pooled(sequence.rid, vector))

    def _settle(self, sequence: Sequence) -> bool:
        """Cache the full blocks of a sequence, or free all if it ended. Return whether it is still live."""
        if sequence.ended:
            self._live.free_unless_in_flight(sequence)
            return False
        self._kv.cache_full_blocks(sequence)
        return True

    def _end_chunk(self, sequence: Sequence, settles: bool, continues: bool) -> None:
        """A chunk of a prompt has been computed. ``settles``: it has filled a block."""
        if settles:
            self._kv.cache_full_blocks(sequence)
        self._connector.peers.computed(sequence)
        self.branch(sequence)
        if not continues:
            self._live.finish(sequence)

    def branch(self, sequence: Sequence) -> None:
        """Put the choices that wait for the prompt's KV at the head of the queue, once the blocks they need have it."""
        if sequence.request.branches and sequence.num_computed >= sequence.branches_at:
            choices = self._choices.branch(sequence)
            for choice in choices:
                self._kv.branch(sequence, choice)
            self._live.queue_choices(choices)
