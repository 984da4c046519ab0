"""The rule by which steps take prompts: first tokens by an objective, and gaps between tokens as short as it allows.

Pure. Nodes plan steps by it (``engine/scheduler/ttft_target.py``), and routers predict waits; docs/fleet.md derives it.
A step of S seconds has S - c seconds of prompts, where its decodes cost the prompts c seconds. So ``work`` seconds of
prompts take work · S / (S - c) in such steps. All times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

#: Share of the time left that a shorter prompt may use up when it goes first; the rest is kept for prompts to come.
_SHARED_SLACK = 0.75
#: One step in so many begins with the oldest late prompt, while there are any.
LATE_TURN = 4
#: Steps that objectives ask for are at most so many times as long as those beside much work.
MOST_STRETCH = 3.0
MOST_ORDERED = 16  # prompts that are ordered for a step: few steps have as many


class Due(NamedTuple):
    """A prompt that waits for its first token."""

    seconds: float  # to compute the rest of it alone
    left: float  # until its objective; negative: it has missed it


class StepPace(NamedTuple):
    """The seconds of the next steps, and the indices of prompts in the order in which steps take them."""

    seconds: float
    first: tuple[int, ...]  # predicted to meet their objective
    late: tuple[int, ...]  # the oldest first


def pace(dues: Sequence[Due], *, ahead: float, decode: float, target: float, limit: float) -> StepPace:
    """Return the pace for ``dues``, listed in the order of arrival, behind ``ahead`` seconds of other prompts.

    ``decode`` is what the decodes of a step cost its prompts. While no prompt is late, the seconds of a step are
    ``useful_step`` between ``target``, which is at least ``decode``, and ``limit``. Longer steps follow only from
    objectives, up to ``longest_paced``.
    """
    longest = longest_paced(useful_step([due.seconds for due in dues], ahead, decode), target, limit)
    first, late = _divide(dues, ahead, _rate(longest, decode))
    seconds = min(longest, max(target, limit))
    work = ahead
    for index in first:
        work += dues[index].seconds
        seconds = max(seconds, needed_step(work, dues[index].left, decode))
    seconds = longest if late else min(seconds, longest)
    order = _shortest_first([dues[index] for index in first], ahead, _rate(seconds, decode))
    return StepPace(seconds, tuple(first[index] for index in order), tuple(late))


def longest_paced(useful: float, target: float, limit: float) -> float:
    """Return the seconds of the longest steps, so that streams never wait for costs of prompts that are far off."""
    return max(target, min(useful, MOST_STRETCH * max(target, limit)))


def needed_step(work: float, left: float, decode: float) -> float:
    """Return the seconds of steps that compute ``work`` seconds of prompts in ``left`` seconds; inf if none do.

    From work · S / (S - c) = left follows S = c · left / (left - work).
    """
    return decode * left / (left - work) if left > work else math.inf


def useful_step(works: Sequence[float], ahead: float, decode: float) -> float:
    """Return the seconds of the steps with which prompts that follow each other get their first tokens earliest.

    A prompt with ``w`` seconds until its end, its own included, gets it after S / 2 + w · S / (S - c) seconds, as it
    comes half a step before the next one. The mean over all prompts is least for S = c + √(2 · mean of w · c).
    """
    if not works:
        return 0.0
    ends = sum(accumulate(works)) / len(works) + ahead
    return decode + math.sqrt(2.0 * decode * ends)


def _rate(step: float, decode: float) -> float:
    """Seconds of prompts per second."""
    return (step - decode) / step if step > 0.0 else 1.0


def _divide(dues: Sequence[Due], ahead: float, rate: float) -> tuple[list[int], list[int]]:
    """Return the prompts that meet their objectives, as many as possible, by deadline, and the others by arrival.

    By J. M. Moore (Management Science 15, 1968): take prompts by deadline; where one would be late, leave out the
    longest so far.
    """
    late = [index for index, (seconds, left) in enumerate(dues) if ahead + seconds > rate * left]
    hopeless = set(late)
    taken = list[tuple[float, int]]()
    work = ahead
    for index in sorted(set(range(len(dues))) - hopeless, key=lambda index: (dues[index].left, index)):
        heappush(taken, (-dues[index].seconds, index))
        work += dues[index].seconds
        if work > rate * dues[index].left:
            seconds, longest = heappop(taken)
            work += seconds
            late.append(longest)
    first = sorted((index for _, index in taken), key=lambda index: (dues[index].left, index))
    return first, sorted(late)


def _shortest_first(dues: Sequence[Due], ahead: float, rate: float) -> list[int]:
    """Order prompts given by deadline. A shorter one goes first where the prompts that it passes have the time.

    The first ``MOST_ORDERED`` places are filled so; the rest stays ordered by deadline.
    """
    rest = list(range(len(dues)))
    order = list[int]()
    work = ahead
    for _ in range(min(MOST_ORDERED, len(rest))):
        best = 0
        slack = math.inf
        end = work
        for place, index in enumerate(rest):
            if dues[index].seconds <= slack and dues[index].seconds < dues[rest[best]].seconds:
                best = place
            end += dues[index].seconds
            slack = min(slack, _SHARED_SLACK * rate * dues[index].left - end)
            if slack <= 0.0:
                break
        order.append(rest.pop(best))
        work += dues[order[-1]].seconds
    return order + rest
