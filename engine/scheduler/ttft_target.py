"""Orders prompts by their objective (``--ttft-target``), and tells how long steps with them have to be.

The rule itself is pdserve/step_pacing.py. It orders new prompts of one client; clients share a node as FairQueue says,
and with prompts of several clients in a step the order is that of ``in_order``. Prompts of requests with output are not
new: streams wait for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice

from engine.images.image_steps import ImageSteps
from engine.scheduler.itl_target import ItlTarget
from engine.sequence import Sequence
from engine.step_cost_meter import StepCostMeter
from pdserve.request_cost import LinearCost
from pdserve.step_pacing import LATE_TURN, MOST_ORDERED, Due, StepPace, pace

_MOST_SEEN = 256  # waiting prompts that a step considers, as it takes time to order them


@dataclass(frozen=True)
class PromptOrder:
    """New prompts in the order in which the next step takes them, and the seconds of the step; 0: no prediction."""

    seconds: float = 0.0
    ranks: Mapping[Sequence, int] = field(default_factory=dict)
    next_waiting: tuple[Sequence, ...] = ()  # the first ``MOST_ORDERED`` of those that wait

    def passes(self, head: Sequence, running: Collection[Sequence]) -> bool:
        """Whether a waiting prompt goes before running ones, which are all of its client."""
        rank = self.ranks.get(head)
        client = head.request.client
        return rank is not None and all(
            prompt.continues_output or (prompt.request.client == client and self.ranks.get(prompt, -1) > rank)
            for prompt in running
        )


NO_ORDER = PromptOrder()


class TtftTarget:
    def __init__(self, meter: StepCostMeter, itl_target: ItlTarget, images: ImageSteps, seconds: float) -> None:
        """``seconds`` from the arrival of a request to its first token; 0: no objective, prompts keep their order."""
        self._meter = meter
        self._images = images
        self._itl_target = itl_target
        self.seconds = seconds
        self._turn = 0  # steps with late prompts

    def order(self, running: Iterable[Sequence], waiting: Iterable[Sequence], now: float, decoding: int) -> PromptOrder:
        """Order the new ones of running and waiting prompts.

        Of more than ``_MOST_SEEN`` waiting ones, half are the oldest, and half the newest: under overload the others
        between them are late, and the newest can still meet their objective.

        ``now``: when the step begins, by the scheduler's clock. ``decoding`` sequences of the node decode meanwhile.
        """
        chunk = self._meter.chunk
        if not self.seconds or chunk is None:
            return NO_ORDER
        running = list(running)
        queued = sorted(waiting, key=_arrived)
        if len(queued) > _MOST_SEEN:
            queued = queued[: _MOST_SEEN // 2] + queued[-_MOST_SEEN // 2 :]
        new = [sequence for sequence in chain(running, queued) if sequence.is_new]
        urgent = [sequence for sequence in chain(running, queued) if not sequence.is_new]
        new.sort(key=_arrived)
        objective = self.seconds - now
        dues = [Due(self._seconds(s, chunk.token), s.request.arrived + objective) for s in new]
        step = self._itl_target.step(decoding)
        chosen = pace(
            dues,
            ahead=sum(self._seconds(sequence, chunk.token) for sequence in urgent),
            decode=max(0.0, step.decode - chunk.hidden) if step else 0.0,
            target=step.seconds if step else 0.0,
            limit=step.limit if step else 0.0,
        )
        prompts = [new[index] for index in self._in_turn(chosen)]
        not_waiting = set(running)
        return PromptOrder(
            chosen.seconds,
            {prompt: rank for rank, prompt in enumerate(prompts)},
            tuple(islice((prompt for prompt in prompts if prompt not in not_waiting), MOST_ORDERED)),
        )

    def _in_turn(self, chosen: StepPace) -> tuple[int, ...]:
        """Return late prompts behind the others, and the oldest of them first in one of ``LATE_TURN`` steps."""
        if not chosen.late:
            return chosen.first
        self._turn += 1
        if self._turn % LATE_TURN:
            return chosen.first + chosen.late
        return chosen.late[:1] + chosen.first + chosen.late[1:]

    def _seconds(self, sequence: Sequence, token: LinearCost) -> float:
        """Return what the rest of a prompt takes alone, with its images."""
        done = max(sequence.num_launched, sequence.table.cached_at_lookup)
        count = max(0, sequence.end_here - done)
        seconds = count * token.at(done + count / 2)
        if not sequence.request.images:
            return seconds
        return seconds + (self._images.missing_work(sequence, done) - count) * self._meter.image_unit


def _arrived(sequence: Sequence) -> float:
    return sequence.request.arrived
