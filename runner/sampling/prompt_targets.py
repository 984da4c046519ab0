"""Prompt tokens whose probabilities a step's logits give: bookkeeping for all runners.

tokens of the prompt    0  1  2  3  4  5  6
computed in this step         ▒  ▒  ▒          their logits predict the next tokens
targets                          ▒  ▒  ▒
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.records import NewSequence, ScheduledSequence


@dataclass(frozen=True, slots=True)
class Targets:
    """One sequence's targets in one step: row ``rows[i]`` of the step's tokens predicts ``token_ids[i]``."""

    seq: int
    first: int  # index of the first target in the prompt
    token_ids: array[int]
    rows: range
    num_top: int


class PromptTargets:
    """Sequences whose prompts are being scored. Steps cost nothing while there are none."""

    def __init__(self) -> None:
        self._open: dict[int, NewSequence] = {}
        self._num_computed: dict[int, int] = {}

    def add(self, new: NewSequence) -> None:
        if new.sampling.prompt_logprobs >= 0 and new.num_scored < new.prompt_len:
            self._open[new.seq] = new
            self._num_computed[new.seq] = new.num_computed

    def remove(self, seq: int) -> None:
        """Stop to score a sequence; an unknown one is ignored."""
        if self._open.pop(seq, None) is not None:
            del self._num_computed[seq]

    def take(self, scheduled: Iterable[ScheduledSequence]) -> list[Targets]:
        """Return the targets of a step, and count its tokens as computed."""
        if not self._open:
            return []
        all_targets = []
        row = 0
        for item in scheduled:
            new = self._open.get(item.seq)
            if new is not None:
                all_targets.append(self._targets(new, row, item.num_tokens))
            row += item.num_tokens
        return [targets for targets in all_targets if targets.rows]

    def _targets(self, new: NewSequence, row: int, num_tokens: int) -> Targets:
        """Return the targets of a sequence whose tokens begin at ``row`` of the step."""
        begin = self._num_computed[new.seq]
        first = max(begin + 1, new.num_scored)
        end = min(begin + num_tokens + 1, new.prompt_len)
        self._num_computed[new.seq] += num_tokens
        if end == new.prompt_len:
            self.remove(new.seq)
        rows = range(row + first - 1 - begin, row + end - 1 - begin)
        return Targets(new.seq, first, new.tokens(first, end), rows, new.sampling.prompt_logprobs)
