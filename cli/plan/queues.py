"""Two exact queueing models: waiting time of prompts, and number of decoding sequences.

Prompts go to the node with the least work, and each node computes them one by one. This is the queue G/G/c with a
common line (M. Harchol-Balter, Performance Modeling and Design of Computer Systems, 2013, ch. 24, "least work left"),
simulated request by request (J. Kiefer, J. Wolfowitz, On the theory of queues with many servers, Trans. AMS 78, 1955).
Waits never grow with longer gaps, shorter prompts or more nodes.

Decoding sequences share each step. This is a processor-sharing queue whose rate depends on the number of sequences,
whose distribution depends only on the mean output length (J. W. Cohen, The multiple phase service network with
generalized processor sharing, Acta Informatica 12, 1979).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate


def waits(gaps: Sequence[float], seconds: Sequence[float], rate: float, nodes: int) -> list[float]:
    """Return the seconds that each request waits. Gaps are divided by ``rate``; requests take ``seconds``."""
    free_at = [0.0] * nodes
    found = []
    for at, taken in zip(accumulate(gap / rate for gap in gaps), seconds, strict=True):
        begin = max(at, free_at[0])
        heapq.heapreplace(free_at, begin + taken)
        found.append(begin - at)
    return found


def beside(gaps: Sequence[float], waited: Sequence[float], seconds: Sequence[float], rate: float) -> list[float]:
    """Return the seconds of work, over all nodes, that arrives while each request waits.

    That work shares the request's steps if there is room.
    """
    times = list(accumulate(gap / rate for gap in gaps))
    work = list(accumulate(seconds, initial=0.0))
    found = []
    for index, (at, wait) in enumerate(zip(times, waited, strict=True)):
        found.append(work[bisect_right(times, at + wait, lo=index + 1)] - work[index + 1])
    return found


def occupancy(demand: float, step: Callable[[int], float], most: int) -> list[float]:
    """Return the share of time in which 0, 1, …, ``most`` sequences decode on a node; further ones wait.

    ``demand`` is in tokens per second; ``step(n)`` is the seconds of a step of n sequences. Requires
    demand · step(most) < most.
    """
    last_ratio = demand * step(most) / most
    assert last_ratio < 1.0, f"{demand} tokens/s exceed the capacity of a node"
    if demand <= 0.0:
        return [1.0] + [0.0] * most
    logs = list(accumulate((math.log(demand) + math.log(step(n) / n) for n in range(1, most + 1)), initial=0.0))
    logs[-1] -= math.log(1.0 - last_ratio)  # geometric tail of the waiting sequences
    peak = max(logs)
    shares = [math.exp(each - peak) for each in logs]
    total = sum(shares)
    return [share / total for share in shares]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that ``percent`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def weighted_percentile(pairs: Iterable[tuple[float, float]], percent: float) -> float:
    """Return the percentile of (value, weight) pairs; 0 without pairs."""
    ordered = sorted(pairs)
    left = sum(weight for _, weight in ordered) * percent / 100
    for value, weight in ordered:
        left -= weight
        if left <= 1e-12:
            return value
    return ordered[-1][0] if ordered else 0.0
