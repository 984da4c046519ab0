"""Drafts of one sequence, and how often they are right."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from engine.sequence_parts import SequenceDrafts
from engine.speculation.acceptance import Acceptance
from engine.speculation.draft_source import DraftSource
from pdserve.records import Drafts


@dataclass(slots=True, eq=False)
class PlannedDrafts(SequenceDrafts):
    """Drafts of the next decode of a sequence, and where they come from."""

    source: DraftSource | None = None  # guesses its next tokens; None until its first draft
    acceptance: Acceptance | None = None  # how often its drafts are right
    num_next: int = 0  # drafts that its next decode should have
    token_ids: tuple[int, ...] = ()  # tokens of these drafts, if they come with the plan
    yielded: tuple[int, ...] = ()  # tokens of its last decode with drafts of a plan, until the runner is told
    verifying: bool = False  # a step in flight verifies drafts of a plan

    def begin(self, source: DraftSource, acceptance: Acceptance) -> None:
        self.source = source
        self.acceptance = acceptance

    def propose(self, token_ids: array[int], most: int) -> tuple[int, ...]:
        """Return up to ``most`` drafts that follow ``token_ids``."""
        assert self.source is not None
        assert self.acceptance is not None
        drafts = self.source.propose(token_ids, most)
        self.acceptance.proposed(drafts)
        return drafts

    def probe(self, token_ids: array[int], most: int) -> None:
        """Find out how often drafts would be right."""
        assert self.source is not None
        assert self.acceptance is not None
        self.acceptance.probe(token_ids, self.source.propose(token_ids, most))

    def use_own(self, num_drafts: int) -> None:
        """Let the next decode verify drafts that the runner makes itself."""
        self.num_next = num_drafts

    def use(self, token_ids: tuple[int, ...]) -> None:
        """Let the next decode verify these drafts."""
        self.token_ids = token_ids
        self.num_next = len(token_ids)

    def take(self, seq: int, num_drafts: int) -> Drafts | None:
        """Return the drafts that the runner needs for the next decode; None if it has them or needs none."""
        drafts = self.token_ids[:num_drafts]
        yielded = self.yielded
        self.use(())
        self.yielded = ()
        self.verifying = bool(drafts)
        return Drafts(seq, drafts, yielded) if drafts or yielded else None

    def count_verified(self, num_drafts: int, token_ids: tuple[int, ...]) -> None:
        """Count the tokens that a decode with drafts of a plan has yielded."""
        assert self.acceptance is not None
        self.acceptance.count(num_drafts, len(token_ids) - 1)
        self.verifying = False
        self.yielded = token_ids

    def forget_yielded(self) -> None:
        self.yielded = ()
