"""Selects the sequences of a step, and tracks the steps that were planned and not applied.

A node of pp stages computes as many steps at a time, one on each stage. A sequence that samples a token at the last
stage cannot continue before the token is back at the first one, so decoding sequences are split among successive steps:

    stage 0   A  B  C  A  B  C          a microbatch is a third of the decoding sequences
    stage 1      A  B  C  A  B
    stage 2         A  B  C  A
                      └─ its tokens ─► stage 0

Chunks of one prompt may follow each other at once: none of them needs a token of another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat

from engine.sequence import Sequence
from pdserve.logprobs import TokenLogprobs
from pdserve.records import StepOutput, StepPlan

#: The first tokens of all choices, or the next one of a choice.
SampledTokens = list[tuple[int, TokenLogprobs | None]]


@dataclass(frozen=True, slots=True)
class RunnableSequences:
    """Running sequences that the next step may include. ``ahead`` are decodes for peers, which may be left out."""

    decodes: tuple[Sequence, ...]
    prompts: tuple[Sequence, ...]
    ahead: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class StepSequences:
    """The sequences of a step, in plan order: decodes (``Sequence.decodes_next``), then prompts.

    Only this class knows which tokens of a step belong to which sequence.
    """

    decodes: tuple[Sequence, ...]
    prompts: tuple[Sequence, ...]

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prompts)

    def decode_tokens(self, output: StepOutput) -> Iterator[tuple[Sequence, int, TokenLogprobs | None]]:
        """Yield each token of the decodes, with its sequence: one of each sequence, or as many as it yields.

        Each of them follows a token of the sequence whose KV the step has computed.
        """
        sequences: Iterable[Sequence] = self.decodes
        if output.decode_counts:
            sequences = chain.from_iterable(map(repeat, self.decodes, output.decode_counts))
        num_tokens = self._num_decode_tokens(output)
        logprobs = map(output.logprobs.get, range(num_tokens))
        return zip(sequences, output.token_ids[:num_tokens], logprobs, strict=True)

    def prompt_tokens(self, plan: StepPlan, output: StepOutput) -> Iterator[tuple[Sequence, int, SampledTokens]]:
        """Yield each prompt with the number of tokens that the step computed, and the sampled ones if it ended."""
        at = self._num_decode_tokens(output)
        for sequence, item in zip(self.prompts, plan.prompts, strict=True):
            samples = range(at, at + item.num_samples)
            yield sequence, item.num_tokens, [(output.token_ids[i], output.logprobs.get(i)) for i in samples]
            at += item.num_samples

    def _num_decode_tokens(self, output: StepOutput) -> int:
        return sum(output.decode_counts) or len(self.decodes)


class StepsInFlight:
    """The steps that were planned and have not been applied, oldest first."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._steps: deque[tuple[int, StepSequences]] = deque()  # with the number of the step
        self._applied = StepSequences((), ())  # the latest

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, step: int, sequences: StepSequences) -> None:
        """Add a planned step. A step without sequences writes nothing and is not tracked."""
        if sequences:
            self._steps.append((step, sequences))

    def pop(self) -> StepSequences:
        """Remove the oldest step, which is being applied."""
        self._applied = self._steps.popleft()[1]
        return self._applied

    @property
    def sequences(self) -> Iterator[Sequence]:
        """The sequences of steps in flight, ended ones included."""
        return chain.from_iterable((*step.decodes, *step.prompts) for _, step in self._steps)

    @property
    def suspects(self) -> set[Sequence]:
        """The live sequences of the steps that an exception may come from: in flight, or being applied."""
        steps = [self._applied, *(sequences for _, sequences in self._steps)]
        return {sequence for step in steps for sequence in (*step.decodes, *step.prompts) if not sequence.ended}

    @property
    def newest_prompts(self) -> Collection[Sequence]:
        return self._steps[-1][1].prompts if self._steps else ()

    def select(self, running: Iterable[Sequence]) -> RunnableSequences:
        """Return the running sequences that the next step may include: tokens are missing and no mask is."""
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        ahead: list[Sequence] = []
        for sequence in running:
            if sequence.constraint is not None and sequence.blocked:
                continue
            if sequence.decodes_next:
                if not sequence.for_peer:
                    decodes.append(sequence)
                elif sequence.can_decode_ahead:
                    ahead.append(sequence)
            elif sequence.missing:
                prompts.append(sequence)
        if self._stages > 1:
            decodes = self._microbatch(decodes)
            ahead = self._microbatch(ahead)
        return RunnableSequences(tuple(decodes), tuple(prompts), tuple(ahead))

    def _microbatch(self, decodes: list[Sequence]) -> list[Sequence]:
        """Return a fair share of ``decodes``, the longest unused ones; none of them is in the last pp - 1 steps.

        With at most pp steps in flight, the tokens that a step continues from have been applied when it is planned;
        with one more they may still be on the device.
        """
        last_steps = list(self._steps)[-self._stages + 1 :]
        busy_since = last_steps[0][0] if last_steps else math.inf
        rested = [sequence for sequence in decodes if sequence.last_step < busy_since]
        rested.sort(key=lambda sequence: sequence.last_step)
        others = len({sequence.last_step for sequence in decodes if sequence.last_step >= busy_since})
        # At most the average microbatch, and enough left for the microbatches that come before these again.
        share = min(-(-len(decodes) // self._stages), -(-len(rested) // (self._stages - others)))
        return rested[:share]
