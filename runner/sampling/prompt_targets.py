"""Which tokens of prompts a step's logits tell the probabilities of. Pure bookkeeping, of all runners.

tokens of the prompt    0  1  2  3  4  5  6
computed in this step         ▒  ▒  ▒          their logits are of the tokens that follow
targets                          ▒  ▒  ▒
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.records import NewSequence, ScheduledSequence


@dataclass(frozen=True, slots=True)
class Targets:
    """Of one sequence in one step. ``rows[i]`` of the step's tokens precedes ``token_ids[i]`` in the prompt."""

    seq: int
    first: int  # index in the prompt of the first of them
    token_ids: array[int]
    rows: range
    num_top: int


class PromptTargets:
    """The sequences whose prompts are to be scored and have not been to their end. Without any it costs nothing."""

    def __init__(self) -> None:
        self._open: dict[int, NewSequence] = {}
        self._num_computed: dict[int, int] = {}

    def add(self, new: NewSequence) -> None:
        if new.sampling.prompt_logprobs >= 0 and new.num_scored < new.prompt_len:
            self._open[new.seq] = new
            self._num_computed[new.seq] = new.num_computed

    def forget(self, seq: int) -> None:
        """Unknown ones are ignored."""
        if self._open.pop(seq, None) is not None:
            del self._num_computed[seq]

    def take(self, scheduled: Iterable[ScheduledSequence]) -> list[Targets]:
        """Those of a step, which counts as computed."""
        if not self._open:
            return []
        found, row = [], 0
        for item in scheduled:
            new = self._open.get(item.seq)
            if new is not None:
                found.append(self._targets(new, row, item.num_tokens))
            row += item.num_tokens
        return [targets for targets in found if targets.rows]

    def _targets(self, new: NewSequence, row: int, num_tokens: int) -> Targets:
        """``row`` is where the sequence's tokens begin in the step."""
        begin = self._num_computed[new.seq]
        first, end = max(begin + 1, new.num_scored), min(begin + num_tokens + 1, new.prompt_len)
        self._num_computed[new.seq] += num_tokens
        if end == new.prompt_len:
            self.forget(new.seq)
        rows = range(row + first - 1 - begin, row + end - 1 - begin)
        return Targets(new.seq, first, new.tokens(first, end), rows, new.sampling.prompt_logprobs)
