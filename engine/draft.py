"""A step while it is being planned: every decode, then prompts one after the other, within a budget of tokens."""

from __future__ import annotations

from engine.requests import Sequence
from pdserve.records import KVConnectorPlan, NewSequence, ScheduledSequence, StepPlan

# Prompt tokens from which on a step's time grows with their number, by kind of device: nothing is won by more.
FULL_STEP = {"cpu": 512, "cuda": 2048}


class StepDraft:
    """Who computes how many tokens in the next step.

    The first prompt may use the whole budget. Others only fill the step up to ``full_step`` tokens of prompts: with
    that many the device is busy computing, so one prompt more would not be done any earlier, but all prompts in the
    step would get their first tokens later. So short prompts go together, and long ones one after the other.
    """

    def __init__(self, max_tokens: int, full_step: int) -> None:
        self._tokens_left = max_tokens
        self._full_step = full_step
        self._prompt_tokens = 0
        self._new: list[NewSequence] = []
        self._scheduled: list[ScheduledSequence] = []
        self.sequences: list[Sequence] = []  # in the order of the plan's ``scheduled``

    @property
    def takes_prompts(self) -> bool:
        return self._tokens_left > 0 and self._prompt_tokens < self._full_step

    def add_decode(self, sequence: Sequence) -> None:
        """The next token of a sequence that misses one. It waits where so many decode that the budget is used up."""
        if self._tokens_left:
            self._add(sequence, 1, ends=True)

    def add_prompt(self, sequence: Sequence) -> None:
        """As many of its missing tokens as there is room for; ``takes_prompts`` must hold."""
        room = self._tokens_left
        if self._prompt_tokens:
            room = min(room, self._full_step - self._prompt_tokens)
        missing = sequence.missing
        num_tokens = min(missing, room)
        self._prompt_tokens += num_tokens
        self._add(sequence, num_tokens, ends=num_tokens == missing)

    def plan(self, step: int, finished: tuple[int, ...], connector: KVConnectorPlan) -> StepPlan:
        return StepPlan(step, finished, tuple(self._new), tuple(self._scheduled), connector)

    def _add(self, sequence: Sequence, num_tokens: int, *, ends: bool) -> None:
        """``ends``: nothing is missing after these tokens, so that the next ones can be sampled."""
        new_blocks: tuple[int, ...] = ()
        if sequence.known_blocks < 0:
            self._new.append(sequence.introduction())
        elif sequence.known_blocks < len(sequence.blocks):
            new_blocks = tuple(sequence.blocks[sequence.known_blocks :])
        sequence.known_blocks = len(sequence.blocks)
        num_samples = sequence.samples_due if ends else 0
        self._scheduled.append(ScheduledSequence(sequence.seq, num_tokens, num_samples, new_blocks))
        self.sequences.append(sequence)
        self._tokens_left -= num_tokens
        sequence.num_launched += num_tokens
        sequence.num_sampling += ends
        sequence.in_flight += 1
