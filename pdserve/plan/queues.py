"""How long requests wait, and how many are served at once: two queues, exact for what they model.

Prompts go to the node with the least work ahead, and each node computes them one after the other: that is the queue
G/G/c with one line for all nodes (M. Harchol-Balter, Performance Modeling and Design of Computer Systems, 2013, ch.
24, "least work left"), followed here request by request (J. Kiefer, J. Wolfowitz, On the theory of queues with many
servers, Trans. AMS 78, 1955). Waits never get longer when requests come further apart, are shorter, or there are more
nodes.

Sequences that decode share each step: a processor-sharing queue whose rate depends on how many there are. How many
there are then depends on the mean length of outputs alone (J. W. Cohen, The multiple phase service network with
generalized processor sharing, Acta Informatica 12, 1979).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate


def waits(gaps: Sequence[float], seconds: Sequence[float], rate: float, nodes: int) -> list[float]:
    """Seconds until each request is begun. ``gaps`` before them are divided by ``rate``; each takes ``seconds``."""
    free_at = [0.0] * nodes
    found = []
    for at, taken in zip(accumulate(gap / rate for gap in gaps), seconds, strict=True):
        begin = max(at, free_at[0])
        heapq.heapreplace(free_at, begin + taken)
        found.append(begin - at)
    return found


def beside(gaps: Sequence[float], waited: Sequence[float], seconds: Sequence[float], rate: float) -> list[float]:
    """Seconds of work that has come behind each request by the time that it is begun, of all nodes together.

    It shares steps with that, where there is room, and so is done when that is.
    """
    times = list(accumulate(gap / rate for gap in gaps))
    work = list(accumulate(seconds, initial=0.0))
    found = []
    for index, (at, wait) in enumerate(zip(times, waited, strict=True)):
        found.append(work[bisect_right(times, at + wait, lo=index + 1)] - work[index + 1])
    return found


def occupancy(demand: float, step: Callable[[int], float], most: int) -> list[float]:
    """The share of time that 0, 1, 2, … ``most`` sequences decode on a node; those beyond wait, and count as ``most``.

    ``demand`` is in tokens per second, ``step(n)`` the seconds in which each of n sequences gets one. The node must be
    able to do it: demand · step(most) < most.
    """
    last_ratio = demand * step(most) / most
    assert last_ratio < 1.0, f"{demand} tokens/s are more than a node decodes"
    if demand <= 0.0:
        return [1.0] + [0.0] * most
    logs = list(accumulate((math.log(demand) + math.log(step(n) / n) for n in range(1, most + 1)), initial=0.0))
    logs[-1] -= math.log(1.0 - last_ratio)  # the geometric tail of those who wait
    peak = max(logs)
    shares = [math.exp(each - peak) for each in logs]
    total = sum(shares)
    return [share / total for share in shares]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of all are at most."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def weighted_percentile(pairs: Iterable[tuple[float, float]], percent: float) -> float:
    """The same of (value, weight); 0 where all weights are."""
    ordered = sorted(pairs)
    left = sum(weight for _, weight in ordered) * percent / 100
    for value, weight in ordered:
        left -= weight
        if left <= 1e-12:
            return value
    return ordered[-1][0] if ordered else 0.0
