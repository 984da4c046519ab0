"""A step while it is being planned: decodes, then prompts one after the other, within a budget of tokens."""

from __future__ import annotations

from engine.request import Sequence
from engine.scheduler.microbatch import StepSequences
from pdserve.records import DigestOrder, KVConnectorPlan, NewBlocks, NewSequence, ScheduledSequence, StepPlan, TokenMask

# Prompt tokens from which on a step's time grows with their number, by kind of device: nothing is won by more.
FULL_STEP = {"cpu": 512, "cuda": 8192, "simulated": 8192}


class StepBuilder:
    """Who computes how many tokens in the next step.

    The first prompt may use the whole budget. Others only fill the step up to ``full_step`` tokens of prompts: with
    that many the device is busy computing, so one prompt more would not be done any earlier, but all prompts in the
    step would get their first tokens later. So short prompts go together, and long ones one after the other.
    """

    def __init__(self, step: int, max_tokens: int, full_step: int) -> None:
        self._step = step
        self._tokens_left = max_tokens
        self._full_step = full_step
        self._prompt_tokens = 0
        self._new: list[NewSequence] = []
        self._new_blocks: list[NewBlocks] = []
        self._scheduled: list[ScheduledSequence] = []
        self._masks: list[TokenMask] = []
        self.participants = StepSequences()  # in the order of the plan's ``scheduled``

    @property
    def takes_prompts(self) -> bool:
        return self._tokens_left > 0 and self._prompt_tokens < self._full_step

    def add_running(self, participants: StepSequences) -> None:
        """Those of the running sequences that may take part: all decodes, and of the prompts as many as fit."""
        self._add_decodes(participants.decodes)
        for sequence in participants.prompts:
            if self.takes_prompts:
                self.add_prompt(sequence)

    def add_prompt(self, sequence: Sequence) -> None:
        """As many of its missing tokens as there is room for; ``takes_prompts`` must hold."""
        room = self._tokens_left
        if self._prompt_tokens:
            room = min(room, self._full_step - self._prompt_tokens)
        missing = sequence.missing
        num_tokens = min(missing, room)
        num_samples = sequence.samples_due if num_tokens == missing else 0
        self._tell_blocks(sequence)
        if num_samples:
            self._add_mask(sequence)
        self._scheduled.append(ScheduledSequence(sequence.seq, num_tokens, num_samples))
        self._tokens_left -= num_tokens
        self._prompt_tokens += num_tokens
        sequence.last_step = self._step
        sequence.num_launched += num_tokens
        sequence.length += num_tokens == missing
        self.participants.prompts.append(sequence)

    def plan(self, finished: tuple[int, ...], connector: KVConnectorPlan, digests: tuple[DigestOrder, ...]) -> StepPlan:
        new, scheduled, new_blocks = tuple(self._new), tuple(self._scheduled), tuple(self._new_blocks)
        return StepPlan(self._step, finished, new, scheduled, new_blocks, connector, digests, tuple(self._masks))

    def _add_decodes(self, sequences: list[Sequence]) -> None:
        """One token of each, ahead of all prompts. No step is too small for all sequences that may run."""
        for sequence in sequences:
            if sequence.known_blocks != len(sequence.blocks):
                self._tell_blocks(sequence)
            if sequence.constraint is not None:
                self._add_mask(sequence)
            self._scheduled.append(sequence.decode)
            sequence.last_step = self._step
            sequence.num_launched += 1
            sequence.length += 1
        self._tokens_left -= len(sequences)
        self.participants.decodes.extend(sequences)

    def _add_mask(self, sequence: Sequence) -> None:
        """What the grammar of a sequence that samples allows, which is used up by that."""
        constraint = sequence.constraint
        if constraint is not None:
            assert constraint.mask is not None, f"sequence {sequence.seq} is scheduled without the mask it needs"
            self._masks.append(TokenMask(sequence.seq, constraint.mask))
            constraint.mask = None

    def _tell_blocks(self, sequence: Sequence) -> None:
        """The runner is told of all blocks of a sequence; together with the sequence where it does not know that."""
        known, sequence.known_blocks = sequence.known_blocks, len(sequence.blocks)
        if known < 0:
            self._new.append(sequence.introduction())
        elif known < len(sequence.blocks):
            self._new_blocks.append(NewBlocks(sequence.seq, tuple(sequence.blocks[known:])))
