"""Measures the cost of steps and reads, as lines fitted to recent ones. Nothing here reads the clock."""

from __future__ import annotations

import math

from pdserve.request_cost import LinearCost, Throughput

_KEEP, _KEEP_DECODES = 0.98, 0.998  # weight of earlier points after each new one: about 50 or 500 points count
_SHARE_SECONDS = 1.0  # time constant of PromptShare
_ALIKE = 0.05  # points whose x differ by less than this share of their mean give no slope


class LineFit:
    """y = base + slope · x through weighted points, by least squares; base and slope are never negative.

    While all x are alike, the line goes through the origin; if ``flat``, it has no slope.
    """

    def __init__(self, keep: float, flat: bool = False) -> None:
        self._keep, self._flat = keep, flat
        self._weight = self._x = self._y = 0.0  # sum of weights; means
        self._xx = self._xy = 0.0  # weighted sums of squares and products about the means

    def __bool__(self) -> bool:
        return self._weight > 0.0

    def add(self, x: float, y: float, weight: float = 1.0) -> None:
        """Add a point; earlier ones lose weight. Welford's update, weighted."""
        old = self._keep * self._weight
        self._weight = old + weight
        dx, dy, share = x - self._x, y - self._y, weight / self._weight
        self._x += dx * share
        self._y += dy * share
        self._xx = self._keep * self._xx + dx * dx * old * share
        self._xy = self._keep * self._xy + dx * dy * old * share

    @property
    def line(self) -> LinearCost:
        """The fitted line; zeros while there are no points."""
        if self._x <= 0.0:
            return LinearCost(self._y) if self._flat else LinearCost()
        steepest = self._y / self._x
        if self._xx <= self._weight * (_ALIKE * self._x) ** 2:
            return LinearCost(self._y) if self._flat else LinearCost(0.0, steepest)
        slope = min(max(self._xy / self._xx, 0.0), steepest)
        return LinearCost(self._y - slope * self._x, slope)


class ThroughputMeter:
    """Measures the throughput of a node.

    A step of ``decodes`` sequences and ``tokens`` of prompts is taken to last

        seconds = decode.at(decodes) + tokens · chunk.at(context)

    so the base of a step, which reads the weights, counts once. ``context`` is the mean number of tokens that a prompt
    token attends to. Chunks learn from steps with decodes only: there each token may cost more than in a full step.
    """

    def __init__(self) -> None:
        self._prompts = LineFit(_KEEP)
        self._decodes = LineFit(_KEEP_DECODES, flat=True)
        self._chunks = LineFit(_KEEP, flat=True)  # seconds per token, by context

    def add_step(self, decodes: int, prompt_tokens: int, seconds: float, context: float = 0.0) -> float:
        """Add a step that computed ``prompt_tokens`` and continued ``decodes`` sequences.

        Return the seconds that the prompts added to it.
        """
        if not prompt_tokens:
            self._decodes.add(decodes, seconds)
            return 0.0
        line = self._decodes.line
        self._prompts.add(prompt_tokens, max(0.0, seconds - decodes * line.slope))
        if not decodes:
            return seconds
        added = max(0.0, seconds - line.at(decodes))
        if self._decodes:
            self._chunks.add(context, added / prompt_tokens, prompt_tokens)
        return added

    @property
    def measures_decodes(self) -> bool:
        """Whether there has been a step that only decodes."""
        return bool(self._decodes)

    @property
    def decode(self) -> LinearCost:
        """Seconds of a step that only decodes, by sequences; zeros while not measured."""
        return self._decodes.line

    @property
    def chunk(self) -> LinearCost | None:
        """Seconds that a prompt token adds to a step with decodes, by its context; None while not measured."""
        if self._chunks:
            return self._chunks.line
        return LinearCost(self._prompts.line.slope) if self._prompts else None

    def throughput(self, read: LinearCost) -> Throughput:
        """Return the measured costs of steps, with those of KV reads."""
        return Throughput(self._prompts.line, self._decodes.line, read)


class PromptShare:
    """The share of recent time that a node's steps spent on prompts: an exponential mean over a second."""

    def __init__(self, now: float) -> None:
        self._share, self._at, self._total = 0.0, now, 0.0

    def update(self, prompt_seconds: float, now: float) -> float:
        """Return the share, 0 … 1, given the seconds spent on prompts since the node's start."""
        if (passed := now - self._at) > 0.0:
            keep = math.exp(-passed / _SHARE_SECONDS)
            spent = (prompt_seconds - self._total) / passed
            self._share = keep * self._share + (1.0 - keep) * spent
            self._at, self._total = now, prompt_seconds
        return min(self._share, 1.0)
