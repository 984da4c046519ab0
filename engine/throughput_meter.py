"""Measures the cost of steps and reads as lines fitted to recent ones. It does not read the clock."""

from __future__ import annotations

from pdserve.request_cost import LinearCost, Throughput

_KEEP, _KEEP_DECODES = 0.98, 0.998  # weight of earlier points after each new one: about 50 or 500 points count
_ALIKE = 0.05  # points whose x differ by less than this share of their mean give no slope


class LineFit:
    """y = base + slope · x through weighted points, by least squares; base and slope are never negative.

    While all x are alike, the line goes through the origin.
    """

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._weight = self._x = self._y = 0.0  # sum of weights; means
        self._xx = self._xy = 0.0  # weighted sums of squares and products about the means

    def add(self, x: float, y: float) -> None:
        """Add a point; earlier ones lose weight. Welford's update, weighted."""
        old = self._keep * self._weight
        self._weight = old + 1.0
        dx, dy = x - self._x, y - self._y
        self._x += dx / self._weight
        self._y += dy / self._weight
        self._xx = self._keep * self._xx + dx * dx * old / self._weight
        self._xy = self._keep * self._xy + dx * dy * old / self._weight

    @property
    def line(self) -> LinearCost:
        """The fitted line; zeros while there are no points."""
        if self._x <= 0.0:
            return LinearCost()
        steepest = self._y / self._x
        if self._xx <= self._weight * (_ALIKE * self._x) ** 2:
            return LinearCost(0.0, steepest)
        slope = min(max(self._xy / self._xx, 0.0), steepest)
        return LinearCost(self._y - slope * self._x, slope)


class ThroughputMeter:
    """Measures the throughput of a node. The cost of decoding is subtracted from steps with prompts."""

    def __init__(self) -> None:
        self._prompts = LineFit(_KEEP)
        self._decodes = LineFit(_KEEP_DECODES)

    def add_step(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """Add a step that computed ``prompt_tokens`` and continued ``decodes`` sequences."""
        if prompt_tokens:
            self._prompts.add(prompt_tokens, max(0.0, seconds - decodes * self._decodes.line.slope))
        else:
            self._decodes.add(decodes, seconds)

    def throughput(self, read: LinearCost) -> Throughput:
        """Return the measured costs of steps, with those of KV reads."""
        return Throughput(self._prompts.line, self._decodes.line, read)
