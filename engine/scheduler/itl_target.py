"""Limits prompts beside sequences that decode, so that the gaps between their tokens keep a target (``--itl-target``).

With d the measured time of a step that only decodes and S the longest step with prompts:

    decodes   ┃S──────────────┃d─┃S──────────────┃d─┃         pauses take a fifth of the time that prompts add
    prompts   ████████████████   ████████████████             S - d seconds' worth of tokens in each chunk

So the longest gap is S, and prompts without end take S / (S - d) + 1/5 times as long as alone. The default S is 9.2 d
of a single sequence. Beside few sequences that makes 1.35, or 1.2 where a step with prompts hides the read of the
weights. The median gap is then d: there are a few more pauses than chunks. Beside many sequences S stays as it is, and
pauses become rare.

A pause delays every prompt behind it, so there are none where they are not needed. Steps without prompts count as
pauses, so that prompts that arrive now and then see none. Nor does the first fifth of a second of prompts, nor a node
with three prompts or more: there the time to first token counts most.

The first step of a sequence after a handoff is a pause: it has waited for its second token long enough. Before that it
waits for the step that executes and for the one behind it. So chunks are a third as long from when P has launched the
last chunk of its prompt. There is no such pause while more requests wait than decode. With six prompts or more, chunks
keep their length.

Decodes for peers (decode-ahead) are not protected: they take place only while no other request needs the device.
"""

from __future__ import annotations

import math

from engine.request import Sequence
from engine.step_cost_meter import ChunkCost, StepCostMeter
from pdserve.request_cost import LinearCost, auto_itl_target

PAUSE = 0.22  # of the seconds that prompts add to steps
BURST = 0.2  # seconds that prompts may add before the first pause
OVERDUE = 0.02  # seconds after which a sequence that should have joined is not waited for
MANY_PROMPTS = 3  # with so many there are no pauses
_MANY = 10**9  # tokens


class ItlTarget:
    """Decides how many seconds of prompts a step may compute."""

    def __init__(
        self,
        meter: StepCostMeter,
        seconds: float | None,
        *,
        stages: int,
        block_size: int,
        first_chunk: int,
        idle_step: float,
    ) -> None:
        """``seconds`` None: ``auto_itl_target``; 0: no limit. ``idle_step``: of one sequence, measured at start, or 0.

        ``first_chunk`` is the number of tokens of a chunk while no prompt has been measured. A token passes
        ``stages`` steps one after the other, so each of them may take only that part of the target.
        """
        self._meter = meter
        self._seconds = seconds
        self._stages = stages
        self._block_size = block_size
        self._first_chunk = first_chunk
        self._idle_step = idle_step
        self._decodes = 1
        self._last = ChunkBudget(0.0, ChunkCost(LinearCost()), block_size, pauses=False)
        self._last_step = 0
        self._owed = -BURST * PAUSE  # seconds of pauses, before the last step

    @property
    def seconds(self) -> float:
        """The target in force; 0: none, or not measured yet."""
        if self._seconds is not None:
            return self._seconds
        decode = self._meter.decode
        return self._stages * auto_itl_target(self._idle_step or decode.at(1), decode.at(self._decodes))

    def budget(
        self,
        step: int,
        *,
        decoding: int,
        decodes: int,
        prompts: int,
        waiting: int,
        joins: bool = False,
        arrival_in: float | None = None,
    ) -> ChunkBudget | None:
        """Return the limit of prompts in a step; None: no limit.

        ``decoding`` sequences of the node decode, ``decodes`` of them in this step; ``prompts`` have begun; ``waiting``
        requests have no blocks; ``joins``: a sequence takes part in a step for the first time, after a handoff;
        ``arrival_in``: seconds from the start of the step until one will; None: unknown. It is called for every step
        that has room and prompts.
        """
        if not decoding or self._seconds == 0.0:
            return None
        self._decodes = -(-decoding // self._stages)
        measured = self._meter.measures_decodes
        decode, cost = self._meter.decode.at(self._decodes), self._meter.chunk
        seconds = max(self.seconds / self._stages - decode, decode)
        if measured and not seconds:
            return None
        if arrival_in is not None and arrival_in > -OVERDUE:
            seconds = min(seconds, max(arrival_in - decode, decode))
        self._owed = self._owed_at(step, decode)
        if prompts + waiting >= MANY_PROMPTS:
            self._owed = min(self._owed, 0.0)
        pauses = (joins and waiting <= decoding) or (decodes > 0 and (self._owed >= decode or not measured))
        cost = cost or ChunkCost(LinearCost(seconds / self._first_chunk))
        self._last = ChunkBudget(seconds, cost, self._block_size, pauses=pauses)
        self._last_step = step
        return self._last

    def _owed_at(self, step: int, decode: float) -> float:
        """Return the seconds of pauses that are owed; less than none if there were many.

        Every step without prompts since the last one pays some.
        """
        last = self._last
        num_pauses = step - self._last_step - (not last.pauses and last.used)
        return max(-BURST * PAUSE, self._owed + last.added * PAUSE - num_pauses * decode)


class ChunkBudget:
    """The seconds of prompts in one step. The oldest prompt keeps half of them, if it needs as much.

    In a pause only sequences that already have output continue, such as after a handoff.
    """

    def __init__(self, seconds: float, cost: ChunkCost, least: int, pauses: bool) -> None:
        """``least``: tokens of the smallest chunk that does not end a prompt."""
        self.pauses = pauses
        self._seconds = seconds + cost.hidden
        self._cost = cost.token
        self._hidden = cost.hidden
        self._least = least
        self._oldest: Sequence | None = None
        self._reserved = 0.0
        self._spent = 0.0

    @property
    def used(self) -> bool:
        """Whether the step has prompts."""
        return self._spent > 0.0

    @property
    def added(self) -> float:
        """Seconds that prompts add to the step."""
        return max(0.0, self._spent - self._hidden)

    def reserve(self, oldest: Sequence) -> None:
        self._oldest = oldest
        self._reserved = min(self._cost_of(oldest, oldest.missing), self._seconds / 2)

    def room(self, sequence: Sequence) -> int:
        """Count the tokens of ``sequence`` that fit, at least ``least`` for the first prompt of a step."""
        if self.pauses and sequence.num_launched < sequence.prompt_len:
            return 0
        left = self._seconds - self._spent - (0.0 if sequence is self._oldest else self._reserved)
        tokens = self._tokens_in(max(left, 0.0), sequence.num_launched)
        if tokens >= min(self._least, sequence.missing):
            return tokens
        return 0 if self._spent else self._least

    def spend(self, sequence: Sequence, num_tokens: int) -> None:
        """Count a chunk that is about to be added."""
        self._spent += self._cost_of(sequence, num_tokens)
        if sequence is self._oldest:
            self._reserved = 0.0

    def _cost_of(self, sequence: Sequence, num_tokens: int) -> float:
        return num_tokens * self._cost.at(sequence.num_launched + num_tokens / 2)

    def _tokens_in(self, seconds: float, context: int) -> int:
        """Solve ``num_tokens · cost.at(context + num_tokens / 2) = seconds``, rounded down."""
        first = self._cost.at(context)
        divisor = first + math.sqrt(first * first + 2.0 * self._cost.slope * seconds)
        return int(min(2.0 * seconds / divisor, _MANY)) if divisor > 0.0 else _MANY
