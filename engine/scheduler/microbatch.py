"""Who takes part in a step, and in those before it that have not been applied.

A node of pp stages computes as many steps at a time, one on each stage. Whose token is drawn at the end of the last
stage cannot go on before it is back at the first one, so the sequences that decode are parted among successive steps:

    stage 0   A  B  C  A  B  C          a microbatch is a third of those that decode
    stage 1      A  B  C  A  B
    stage 2         A  B  C  A
                      └─ its tokens ─► stage 0

Chunks of one prompt may follow each other at once: none of them needs a token of another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from engine.request import Sequence
from pdserve.records import Sample, ScheduledSequence


@dataclass(frozen=True, slots=True)
class StepSequences:
    """Of a step. A decode computes one token and samples the next; other parts of a sequence count as prompts.

    ``ahead`` are decodes for peers that are to take them over, which may be left out.
    """

    decodes: list[Sequence] = field(default_factory=list)
    prompts: list[Sequence] = field(default_factory=list)
    ahead: list[Sequence] = field(default_factory=list)

    @classmethod
    def among(cls, running: Iterable[Sequence]) -> StepSequences:
        """Those that miss tokens, and need not wait for what their grammar allows."""
        found = cls()
        for sequence in running:
            if sequence.constraint is not None and sequence.blocked:
                continue
            missing = sequence.missing
            if missing == 1 and sequence.length > sequence.prompt_len:
                if not sequence.for_peer:
                    found.decodes.append(sequence)
                elif sequence.may_go_ahead:
                    found.ahead.append(sequence)
            elif missing:
                found.prompts.append(sequence)
        return found

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prompts)

    def decoded(self, samples: tuple[Sample, ...]) -> Iterator[tuple[Sequence, Sample]]:
        """Of the step's samples those of the decodes."""
        return zip(self.decodes, samples[: len(self.decodes)], strict=True)

    def computed(
        self, scheduled: tuple[ScheduledSequence, ...], samples: tuple[Sample, ...]
    ) -> Iterator[tuple[Sequence, int, tuple[Sample, ...]]]:
        """Of each prompt how many tokens the step has computed, and its samples, if it ended."""
        rest = iter(samples[len(self.decodes) :])
        for sequence, item in zip(self.prompts, scheduled[len(self.decodes) :], strict=True):
            yield sequence, item.num_tokens, tuple(islice(rest, item.num_samples))


class StepsInFlight:
    """The steps that were planned and have not been applied, oldest first."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._steps: deque[tuple[int, StepSequences]] = deque()  # by the number of the step

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, step: int, participants: StepSequences) -> None:
        """A step was planned; one that nobody takes part in writes nothing and is not waited for."""
        if participants:
            self._steps.append((step, participants))

    def pop(self) -> StepSequences:
        """The oldest step is being applied."""
        return self._steps.popleft()[1]

    def compute_prompts_besides(self, sequence: Sequence) -> bool:
        """Whether one of them computes prompts, and not that of ``sequence``."""
        return any(step.prompts and sequence not in step.prompts for _, step in self._steps)

    @property
    def newest_prompts(self) -> list[Sequence]:
        """Whose prompts the last of them computes."""
        return self._steps[-1][1].prompts if self._steps else []

    def choose(self, running: Iterable[Sequence]) -> StepSequences:
        """Who may take part in the next step."""
        found = StepSequences.among(running)
        if self._stages == 1:
            return found
        return StepSequences(self._microbatch(found.decodes), found.prompts, self._microbatch(found.ahead))

    def _microbatch(self, decodes: list[Sequence]) -> list[Sequence]:
        """A fair share of ``decodes``, those that have rested longest; none is in one of the last pp - 1 steps.

        So with pp steps in flight at most, the tokens with which a step goes on have been applied when it is planned;
        with one more they may still be on the device.
        """
        last_steps = list(self._steps)[-self._stages + 1 :]
        busy_since = last_steps[0][0] if last_steps else math.inf
        rested = [sequence for sequence in decodes if sequence.last_step < busy_since]
        rested.sort(key=lambda sequence: sequence.last_step)
        others = len({sequence.last_step for sequence in decodes if sequence.last_step >= busy_since})
        # No more than all have on average, and enough left for the microbatches that are yet to come before these.
        share = min(-(-len(decodes) // self._stages), -(-len(rested) // (self._stages - others)))
        return rested[:share]
