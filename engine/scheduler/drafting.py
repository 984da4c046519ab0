"""Drafts: guesses of next tokens, which a decode verifies beside its newest token (docs/speculation.md).

They come from a ``DraftSource`` of the engine, or the runner makes them. A source reads the tokens so far, so the
engine waits for them:

    step        t d1 d2 d3        t: the newest token
    applied     s1 s2 s3          d1 and d2 were right
    next step   s3 e1 e2 e3       planned now, and not while the step was in flight

A runner that drafts knows the tokens itself; then the next step is planned while this one is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from engine.draft_source import DraftSource
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.request import Sequence
from engine.scheduler.step_builder import StepBuilder
from pdserve.records import Drafts, ScheduledSequence


class Drafting:
    """Decides how many drafts each decode has, and which."""

    def __init__(
        self, kv: KVCacheManager, most: int, make_source: Callable[[], DraftSource] | None, stages: int
    ) -> None:
        """``most``: drafts of a decode; 0: none. Each sequence gets a source; without one the runner drafts."""
        self._kv = kv
        self._most = most
        self._make_source = make_source if most else None
        self._stages = stages
        self._num_drafts = 0  # of the step that is planned
        self._drafts: list[Drafts] = []  # of these, those of a source

    def must_wait(self, running: Iterable[Sequence]) -> bool:
        """Whether no step is planned before the one in flight has ended, since drafts follow its tokens.

        All sequences wait then: two steps of some cost more than one of all. Pipeline stages compute others meanwhile.
        """
        return self._make_source is not None and self._stages == 1 and any(map(self._waits, running))

    def ready(self, running: Collection[Sequence]) -> Collection[Sequence]:
        """Return the sequences that may take part in the next step: all but those whose drafts follow a result."""
        return running if self._make_source is None else [each for each in running if not self._waits(each)]

    def _waits(self, sequence: Sequence) -> bool:
        """Whether a step in flight verifies drafts, or samples a token that drafts will follow."""
        if not sequence.in_flight:
            return False
        return sequence.verifying or (sequence.decodes_here and sequence.draft_limit(self._most) > 0)

    def add_decodes(self, builder: StepBuilder, sequences: Collection[Sequence]) -> None:
        """Add decodes to a step, with drafts as far as blocks are free. Those of a source follow tokens on the host."""
        if not self._most:
            builder.add_decodes(sequences)
            self._kv.decoded(sequences)  # models with recurrent states have no drafts
            return
        for sequence in sequences:
            limit = sequence.draft_limit(self._most)
            if self._make_source is None:
                sequence.want_drafts(limit)
            elif limit > 0 and not sequence.in_flight:
                sequence.draft(self._make_source, limit)
        self._kv.grow_for_drafts(sequences)
        builder.add_decodes(sequences, self._launch)
        builder.count_drafts(self._num_drafts, self._drafts)
        self._num_drafts, self._drafts = 0, []

    def _launch(self, sequence: Sequence, step: int) -> ScheduledSequence:
        """Launch a decode with as many of its drafts as fit into its blocks."""
        num_drafts = min(sequence.num_drafts, min(sequence.capacity, sequence.covered) - sequence.length)
        if (drafts := sequence.take_drafts(num_drafts)) is not None:
            self._drafts.append(drafts)
        self._num_drafts += num_drafts
        return sequence.launch_drafts(step, num_drafts) if num_drafts else sequence.launch_decode(step)
