"""Drafts of decodes, as the scheduler sees them. engine/speculation/ plans them (docs/speculation.md)."""

from __future__ import annotations

from collections.abc import Callable, Collection

from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.scheduler.microbatch import StepSequences
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.scheduler.step_builder import StepBuilder
from engine.sequence import Sequence
from engine.step_cost_meter import StepCostMeter
from pdserve.ipc.messages import EventBatch, Totals
from pdserve.records import StepOutput, StepPlan


class Drafting:
    """The interface, and a node without speculation."""

    def must_wait(self, running: Collection[Sequence]) -> bool:
        """Whether no step is planned before the one in flight has ended, since drafts follow its tokens."""
        return False

    def ready(self, running: Collection[Sequence]) -> Collection[Sequence]:
        """Return the sequences that may take part in the next step: all but those whose drafts follow a result."""
        return running

    def add_decodes(self, builder: StepBuilder, sequences: Collection[Sequence]) -> None:
        """Add decodes to a step, with their drafts."""
        builder.add_decodes(sequences)

    def ahead(self, running: Collection[Sequence]) -> int:
        """Return how many drafts the model makes behind the step that is planned, for the one after it."""
        return 0

    def propose(self, sequence: Sequence) -> tuple[int, ...]:
        """Return drafts of a sequence whose masks follow from them. The step may use fewer."""
        return ()

    def verified(self, step: StepSequences, plan: StepPlan, output: StepOutput) -> None:
        """Take in which drafts of a step were right, before its tokens are taken."""

    def count(self, step: StepSequences, plan: StepPlan, output: StepOutput) -> None:
        """Count the drafts of a step after the tokens of its decodes were taken."""

    def keep(self, step: StepSequences, output: StepOutput) -> None:
        """Keep the drafts that the model has made behind all tokens of a step."""


NO_DRAFTS = Drafting()
DraftingFactory = Callable[[SchedulerConfig, KVCacheManager, StepCostMeter, Totals, EventBatch], Drafting]


def no_drafting(
    config: SchedulerConfig, kv: KVCacheManager, meter: StepCostMeter, totals: Totals, events: EventBatch
) -> Drafting:
    """Return the object of a node without speculation."""
    return NO_DRAFTS
