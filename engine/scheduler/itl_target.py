"""Limits prompts beside sequences that decode, so that the gaps between their tokens keep a target (``--itl-target``).

A prompt that is put off delays its own first token, and the sequences that decode beside it save nothing: its seconds
come later. So each step computes prompts, as many as the target allows. With S the target and d the seconds of a step
that only decodes:

    decodes   ┃S──────────────┃S──────────────┃d─┃d─┃d─┃         the longest gap is S
    prompts   ████████████████ ████████████▌                     S - d seconds' worth of tokens in each chunk

Prompts take S / (S - d) times as long as alone. The default S is 9 d of a single sequence, or 2 d of all where that is
longer: prompts then take 9 / 8 of the time beside few sequences, and get half of the time beside many.

A sequence that comes by a handoff has such a gap, too: it waits for a step, and then takes part in one. P says when the
last chunk of its prompt ends, so D knows when it will come. It waits for half of a chunk at most, and the step in which
it joins is shorter by its wait:

    on P      ▐last chunk▌ first token
    on D      ┃─────────────── half a chunk ┃ S less the wait ┃     so this gap is S as well

The expectation may be wrong by half a chunk then. A sequence that is overdue is waited for ``OVERDUE`` seconds.

Decodes for peers (decode-ahead) are not protected: their peers take over soon.

Steps are longer than the target beside much work of prompts, and while prompts would miss ``--ttft-target`` otherwise:
see ttft_target.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import NamedTuple

from engine.kv_cache.peer_kv import PeerKV
from engine.scheduler.microbatch import RunnableSequences
from engine.sequence import Sequence
from engine.step_cost_meter import ChunkCost, StepCostMeter
from pdserve.request_cost import ITL_LIMIT, LinearCost, auto_itl_target

OVERDUE = 0.02  # seconds after which a sequence that should have joined is not waited for
_MANY = 10**9  # tokens


class MixedStep(NamedTuple):
    """A step with decodes and prompts, in seconds."""

    seconds: float
    limit: float  # with much work of prompts
    decode: float  # the part that the decodes take


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

    @property
    def seconds(self) -> float:
        """The target in force; 0: none, or not measured yet."""
        if self._seconds is not None:
            return self._seconds
        decode = self._meter.decode
        return self._stages * auto_itl_target(self._idle_step or decode.at(1), decode.at(self._decodes))

    @property
    def limit(self) -> float:
        """The seconds up to which much work of prompts may stretch the target: an explicit one by nothing."""
        return max(self.seconds, ITL_LIMIT) if self._seconds is None else self._seconds

    def step(self, decoding: int) -> MixedStep | None:
        """Return a step that keeps the target while ``decoding`` sequences of the node decode; None: no limit."""
        if not decoding or self._seconds == 0.0:
            return None
        self._decodes = -(-decoding // self._stages)
        decode = self._meter.decode.at(self._decodes)
        least = 2.0 * decode
        return MixedStep(max(self.seconds / self._stages, least), max(self.limit / self._stages, least), decode)

    def budget(
        self, *, decoding: int, waited: float | None = None, arrival_in: float | None = None, longest: float = 0.0
    ) -> ChunkBudget | None:
        """Return the limit of prompts in a step; None: no limit.

        ``decoding`` sequences of the node decode. ``waited``: the longest time, in seconds, from the last token of a
        sequence that joins in this step until the step; None: none joins. ``arrival_in``: seconds from the start of the
        step until the next one will come; None: unknown. ``longest``: seconds of the step where its prompts need more
        than the target allows.
        """
        step = self.step(decoding)
        if step is None:
            return None
        decode = step.decode
        cost = self._meter.chunk
        seconds = max(step.seconds, longest) - decode
        if self._meter.measures_decodes and not seconds:
            return None
        cost = cost or ChunkCost(LinearCost(seconds / self._first_chunk))
        most = seconds
        if waited is not None:
            seconds = max(most - waited, 0.0)
        if arrival_in is not None:
            seconds = min(seconds, max(arrival_in + most / 2 - decode, 0.0))
        return ChunkBudget(seconds, cost, self._meter.image_unit or cost.token.base, self._block_size)


class ChunkBudget:
    """The seconds of prompts in one step. The oldest prompt keeps half of them, if it needs as much."""

    def __init__(self, seconds: float, cost: ChunkCost, image_unit: float, least: int) -> None:
        """``image_unit``: StepCostMeter's. ``least``: tokens of the smallest chunk that does not end a prompt."""
        self._seconds = seconds + cost.hidden
        self._cost = cost.token
        self._image_unit = image_unit
        self._least = least
        self._oldest: Sequence | None = None
        self._reserved = 0.0
        self._spent = 0.0

    def reserve(self, oldest: Sequence) -> None:
        self._oldest = oldest
        self._reserved = min(self._cost_of(oldest, oldest.missing), self._seconds / 2)

    def room(self, sequence: Sequence) -> int:
        """Count the tokens of ``sequence`` that fit, at least ``least`` for the first prompt of a step."""
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

    def spend_images(self, work: int) -> None:
        """Count the encoding of images, in units of their work."""
        self._spent += work * self._image_unit

    def image_room(self, sequence: Sequence) -> int:
        """Count the work of images, as ``spend_images`` counts it, which fits for ``sequence``."""
        left = self._seconds - self._spent - (0.0 if sequence is self._oldest else self._reserved)
        unit = self._image_unit
        return int(min(max(left, 0.0) / unit, _MANY)) if unit > 0.0 else _MANY

    def _cost_of(self, sequence: Sequence, num_tokens: int) -> float:
        return num_tokens * self._cost.at(sequence.num_launched + num_tokens / 2)

    def _tokens_in(self, seconds: float, context: int) -> int:
        """Solve ``num_tokens · cost.at(context + num_tokens / 2) = seconds``, rounded down."""
        first = self._cost.at(context)
        divisor = first + math.sqrt(first * first + 2.0 * self._cost.slope * seconds)
        return int(min(2.0 * seconds / divisor, _MANY)) if divisor > 0.0 else _MANY


def in_order(
    prompts: Iterable[Sequence], budget: ChunkBudget | None, ranks: Mapping[Sequence, int]
) -> Collection[Sequence]:
    """Return running prompts in the order in which a step takes them.

    Prompts that continue an output come first. Other prompts of a single client follow by ``ranks``, those without a
    rank first. With prompts of several clients and a limit, up to half of it is reserved for the oldest one, which
    comes last; the rest goes to the others, fewest missing tokens first.
    """
    outputs = list[Sequence]()
    others = list[Sequence]()
    for sequence in prompts:
        (outputs if sequence.continues_output else others).append(sequence)
    if ranks and len({sequence.request.client for sequence in others}) == 1:
        others.sort(key=lambda sequence: ranks.get(sequence, -1))
    elif budget is not None and others:
        budget.reserve(others[0])
        others = [*sorted(others[1:], key=lambda sequence: sequence.missing), others[0]]
    return outputs + others


class JoiningStreams:
    """When streams join the decodes after a handoff: how long some have waited, and when the next one comes.

    Times are of the scheduler's ``clock``. ``busy``: seconds until the device can begin the planned step.
    """

    def __init__(self, peers: PeerKV, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._clock = clock

    def longest_wait(self, runnable: RunnableSequences, busy: float) -> float | None:
        """Return the longest time from a token until the planned step, of the sequences that join after a handoff."""
        joining = (sequence for sequence in chain(runnable.decodes, runnable.prompts) if sequence.joins_after_handoff)
        first = min((sequence.request.waits_since for sequence in joining), default=None)
        return None if first is None else self._clock() + busy - first

    def arrival_in(self, busy: float) -> float | None:
        """Return the seconds from the start of the planned step until the next stream joins; None if none is near.

        Streams that are long overdue do not count.
        """
        begin = self._clock() + busy
        return min((at - begin for at in self._peers.arrivals if at > begin - OVERDUE), default=None)
