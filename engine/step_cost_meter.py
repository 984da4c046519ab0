"""Measures the cost of steps and reads, as lines fitted to recent ones. Nothing here reads the clock."""

from __future__ import annotations

import math
from typing import NamedTuple

from pdserve.request_cost import LinearCost, StepCosts, in_range

_KEEP = 0.98  # weight of earlier points after each new one: about 50 points count
_KEEP_DECODES = 0.998  # weight of earlier steps that only decode: about 500 count
_ALIKE = 0.05  # points whose x differ by less than this share of their mean give no slope
_LEAST_SPREAD = 2.0  # sequences: a slope between steps that differ by less says nothing of steps with a hundred of them
_SCALE = 1000.0  # tokens; keeps the terms of a fit of chunks in the same order
_OUTLIER_RATIO = 1.5  # measured to expected seconds, above which a step is an outlier: first uses of a kernel are slow
_FEW_OUTLIERS = 2  # outliers that count little; further ones are learned in full
_LARGE = 1000  # tokens of a step whose time grows in proportion to them
_MOST_ADDED = 2.0  # cap on the time that drafts add, as a multiple of the step without drafts
_FIRST_USES = 2  # steps with drafts that are not measured: a kernel's first use takes longer
_DRAFTS_HALF_LIFE = 300  # steps without drafts that halve the cost of drafts, so that some are tried again
_KEEP_IMAGES = 0.9  # weight of earlier work of images after each step with some
_RIDGE = 1e-6  # relative to a term's weight: where points cannot separate the terms, the cost goes to ``token``


class StepWork(NamedTuple):
    """The work of a step. Its prompt tokens attend to ``context`` tokens each, on average.

    ``images``: the encoding of images, in tokens of a prompt by their operations; see ``StepCostMeter.image_unit``.
    """

    decodes: int = 0
    prompt_tokens: int = 0
    context: float = 0.0
    drafts: int = 0
    images: int = 0


class LineFit:
    """y = base + slope · x through weighted points, by least squares; base and slope are never negative.

    The line goes through the mean of the points. A share of the mean y, 0 … 1, grows with x, and the rest is the base:
    so no rounding makes either of them negative. While all x are alike, all of it grows; if ``flat``, nothing does.
    """

    def __init__(self, keep: float, flat: bool = False) -> None:
        self._keep = keep
        self._flat = flat
        self._weight = 0.0  # sum of weights
        self._x = 0.0  # means
        self._y = 0.0
        self._xx = 0.0  # weighted sums of squares and products about the means
        self._xy = 0.0

    def __bool__(self) -> bool:
        return self._weight > 0.0

    def add(self, x: float, y: float, weight: float = 1.0) -> None:
        """Add a point of x ≥ 0 and y seconds; earlier ones lose weight. Welford's update, weighted."""
        y = in_range(y)
        old = self._keep * self._weight
        self._weight = old + weight
        dx = x - self._x
        dy = y - self._y
        share = weight / self._weight
        self._x += dx * share
        self._y += dy * share
        self._xx = self._keep * self._xx + dx * dx * old * share
        self._xy = self._keep * self._xy + dx * dy * old * share

    @property
    def mean_x(self) -> float:
        return self._x

    @property
    def mean_y(self) -> float:
        return self._y

    @property
    def spread(self) -> float:
        """Standard deviation of x."""
        return math.sqrt(self._xx / self._weight) if self else 0.0

    @property
    def line(self) -> LinearCost:
        """The fitted line; zeros while there are no points."""
        return self._line(self._growing)

    def with_base_up_to(self, most: float) -> LinearCost:
        """Return the fitted line; if its base exceeds ``most``, one with this base, through the mean of the points."""
        line = self.line
        return self._line(1.0 - most / self._y) if line.base > most else line

    @property
    def _growing(self) -> float:
        """The share of the mean y that grows with x."""
        if self._xx <= self._weight * (_ALIKE * self._x) ** 2:
            return 0.0 if self._flat else 1.0
        slope = self._xy / self._xx
        steepest = self._y / self._x
        return slope / steepest if 0.0 < slope < steepest else float(slope > 0.0)

    def _line(self, growing: float) -> LinearCost:
        slope = growing * self._y / self._x if self._x > 0.0 else 0.0
        return LinearCost((1.0 - growing) * self._y, in_range(slope))


class ChunkCost(NamedTuple):
    """Seconds that prompts add to a step that decodes. ``ChunkFit`` explains the terms."""

    token: LinearCost  # by context
    hidden: float = 0.0

    def at(self, tokens: int, context: float) -> float:
        return max(0.0, tokens * self.token.at(context) - self.hidden)


class ChunkFit:
    """Seconds that prompts add to a step that decodes, by weighted least squares; no term is negative:

        max(0, tokens · (token + slope · context) - hidden)

    ``hidden`` is the part that takes no time of its own: a GPU computes some tokens while it reads the weights. The fit
    goes on while the node serves: costs measured once miss lower clocks, and what other processes take of the device.
    """

    def __init__(self, keep: float) -> None:
        self._keep = keep
        # Weighted sums over the points, of products of t = tokens, c = tokens · context and s = seconds.
        self._weight = 0.0
        self._t = 0.0
        self._c = 0.0
        self._s = 0.0
        self._tt = 0.0
        self._tc = 0.0
        self._cc = 0.0
        self._ts = 0.0
        self._cs = 0.0

    def __bool__(self) -> bool:
        return self._weight > 0.0

    def add(self, tokens: float, context: float, seconds: float) -> None:
        """Add a point, weighted by its tokens; earlier ones lose weight."""
        t = tokens / _SCALE
        c = tokens * context / _SCALE**2
        keep = self._keep
        wt = tokens * t
        wc = tokens * c
        self._weight = keep * self._weight + tokens
        self._t = keep * self._t + wt
        self._c = keep * self._c + wc
        self._s = keep * self._s + tokens * seconds
        self._tt = keep * self._tt + wt * t
        self._tc = keep * self._tc + wt * c
        self._cc = keep * self._cc + wc * c
        self._ts = keep * self._ts + wt * seconds
        self._cs = keep * self._cs + wc * seconds

    def cost(self, most_hidden: float) -> ChunkCost:
        """Return the fitted cost with at most ``most_hidden`` seconds; all zeros while there are no points.

        The least error for a given ``hidden`` is a convex function of it. So the best one within the bounds is the
        bound next to the best one of all.
        """
        if not self:
            return ChunkCost(LinearCost())
        weight = self._weight * (1.0 + _RIDGE)
        cc = self._cc * (1.0 + _RIDGE)
        # The best ``hidden`` is t · token + c · slope - s.
        t = self._t / weight
        c = self._c / weight
        best_of_all = _two_terms(
            (self._tt - self._t * t, self._tc - self._t * c, cc - self._c * c),
            (self._ts - self._s * t, self._cs - self._s * c),
        )
        hidden = t * best_of_all[0] + c * best_of_all[1] - self._s / weight
        hidden = min(max(hidden, 0.0), most_hidden)
        sums = self._ts + self._t * hidden, self._cs + self._c * hidden
        token, slope = _two_terms((self._tt, self._tc, cc), sums)
        return ChunkCost(LinearCost(token / _SCALE, slope / _SCALE**2), hidden)


def _two_terms(products: tuple[float, float, float], sums: tuple[float, float]) -> tuple[float, float]:
    """Return the x, y ≥ 0 with the least error, by the normal equations a·x + b·y = p, b·x + c·y = q."""
    a, b, c = products
    p, q = sums
    determinant = a * c - b * b
    if determinant > 0.0:
        x = (c * p - b * q) / determinant
        y = (a * q - b * p) / determinant
        if x >= 0.0 and y >= 0.0:
            return x, y
    x = max(0.0, p / a) if a > 0.0 else 0.0
    y = max(0.0, q / c) if c > 0.0 else 0.0
    return (x, 0.0) if p * x >= q * y else (0.0, y)  # one term takes half of this off the error


class StepCostMeter:
    """Measures the costs of a node.

    A step of ``decodes`` sequences and prompts takes ``decode.at(decodes)`` seconds and those that ``chunk`` adds. So
    the base of a step, which reads the weights, counts once. ``context`` is the mean number of tokens that a prompt
    token attends to. Chunks learn from steps with decodes only: there each token may cost more than in a full step.
    Steps that encode images tell about images alone.
    """

    def __init__(self) -> None:
        self._prompts = LineFit(_KEEP)
        self._decodes = LineFit(_KEEP_DECODES, flat=True)
        self._chunks = ChunkFit(_KEEP)
        self._chunk: ChunkCost | None = None
        self._drafts = LineFit(_KEEP, flat=True)
        self.most_drafts = 0  # most drafts in a measured step
        self._num_drafted = 0  # steps that only decode, with drafts
        self._undrafted = 0  # steps since the last one with drafts
        self._num_outliers = 0  # outliers less expected steps, at least 0
        self._context = 0.0  # mean of recent prompts, by steps
        self._image_work = 0.0
        self._image_seconds = 0.0

    def add_step(
        self,
        decodes: int,
        prompt_tokens: int,
        seconds: float,
        context: float = 0.0,
        drafts: int = 0,
        images: int = 0,
        *,
        ahead: bool = False,
    ) -> float:
        """Add a step that computed ``prompt_tokens`` and continued ``decodes`` sequences, with ``drafts`` in all.

        Return the seconds that prompts and ``images`` added to it. In a step ``ahead`` the model has made drafts for
        the next one: a part of what drafts cost.
        """
        if images:
            return self._add_images(StepWork(decodes, prompt_tokens, context, drafts), images, in_range(seconds))
        if not decodes and not prompt_tokens:
            return 0.0
        seconds = in_range(seconds)
        self._undrafted = 0 if drafts else self._undrafted + 1
        if drafts and not prompt_tokens:
            self._num_drafted += 1
            if self._decodes and self._num_drafted > _FIRST_USES:
                plain = self._decodes.line.at(decodes)
                self._drafts.add(drafts, min(max(0.0, seconds - plain), _MOST_ADDED * plain))
                self.most_drafts = max(self.most_drafts, drafts)
            return 0.0
        if drafts:
            seconds = max(0.0, seconds - self.drafts.at(drafts))
        if ahead and self._decodes and not prompt_tokens:
            return 0.0
        if not prompt_tokens:
            self._decodes.add(decodes, self._credible(self._decodes.line.at(decodes), seconds))
            return 0.0
        line = self._decodes.line
        token = self.prompt.slope
        usual_tokens = self._prompts.mean_x
        self._prompts.add(prompt_tokens, max(0.0, seconds - decodes * line.slope))
        self._context = context if self._context == 0.0 else _KEEP * self._context + (1.0 - _KEEP) * context
        if not decodes:
            return seconds
        added = max(0.0, seconds - line.at(decodes))
        expected = self._chunk.at(prompt_tokens, context) if self._chunk else 0.0
        if self._decodes and (added or expected):  # else all of it is hidden, as expected
            if not self._chunks and usual_tokens >= _LARGE:  # a first small chunk would tell little about large ones
                self._chunks.add(_LARGE, self._context, _LARGE * token)
            self._chunks.add(prompt_tokens, context, min(added, self._credible(expected, added, line.base)))
            self._chunk = self._chunks.cost(line.base)
        return added

    def _add_images(self, text: StepWork, images: int, seconds: float) -> float:
        plain = self.expected(text)
        if plain < math.inf:
            self._image_seconds = _KEEP_IMAGES * self._image_seconds + max(0.0, seconds - plain)
            self._image_work = _KEEP_IMAGES * self._image_work + images
        elif not self._prompts:  # until prompts are measured
            self._prompts.add(text.prompt_tokens + images, seconds)
        return max(0.0, seconds - (self._decodes.line.at(text.decodes) if text.decodes else 0.0))

    def _credible(self, expected: float, measured: float, least: float = 0.0) -> float:
        """Return the most seconds to learn from: an outlier, such as the first step of a kernel, counts little.

        Several outliers are learned in full. A fast step is no outlier: then the fit was wrong. If at most ``least``
        seconds are expected, no step is an outlier.
        """
        if expected <= least:
            return measured
        most = expected * _OUTLIER_RATIO
        is_outlier = measured > most
        self._num_outliers = max(0, self._num_outliers + (1 if is_outlier else -1))
        return most if is_outlier and self._num_outliers <= _FEW_OUTLIERS else measured

    @property
    def measures_decodes(self) -> bool:
        """Whether there has been a step that only decodes."""
        return bool(self._decodes)

    @property
    def decode(self) -> LinearCost:
        """Seconds of a step that only decodes, by sequences; zeros while not measured."""
        return self._decodes.line

    @property
    def prompt(self) -> LinearCost:
        """Seconds of a step that only computes prompts, by their tokens; zeros while not measured.

        Steps that keep an ITL target take equally long: they have few tokens where these attend to many, which looks
        like a base. But the base is at most that of a step that decodes, as both steps read the weights.
        """
        return self._prompts.with_base_up_to(self._decodes.line.base) if self._decodes else self._prompts.line

    @property
    def drafts(self) -> LinearCost:
        """Seconds that drafts add to a step, by their number; zeros while not measured, lower as that gets old."""
        line = self._drafts.line
        share = 0.5 ** (self._undrafted / _DRAFTS_HALF_LIFE)
        return LinearCost(line.base * share, line.slope * share)

    @property
    def image_unit(self) -> float:
        """Seconds of a unit of the work of images; that of a token that attends to none until measured, or 0."""
        if self._image_work:
            return self._image_seconds / self._image_work
        return self.chunk.token.base if self.chunk is not None else 0.0

    @property
    def chunk(self) -> ChunkCost | None:
        """The cost that prompts add to a step that decodes; None while no step had prompts."""
        if self._chunk is None and self._prompts:
            return ChunkCost(LinearCost(self.prompt.slope))
        return self._chunk

    def expected(self, work: StepWork) -> float:
        """Return the seconds that a step takes, as predicted by measured steps; inf while none was like it."""
        decodes, prompt_tokens, context, drafts, images = work
        seconds = images * self.image_unit
        if images and not seconds:
            return math.inf
        if not decodes:
            if not prompt_tokens:
                return seconds
            return seconds + self.prompt.at(prompt_tokens) if self._prompts else math.inf
        if not (self._decodes and (self._prompts or not prompt_tokens)):
            return math.inf
        seconds += self._decodes.line.at(decodes)
        if drafts:
            seconds += self.drafts.at(drafts)
        if prompt_tokens and (chunk := self.chunk) is not None:
            seconds += chunk.at(prompt_tokens, context)
        return seconds

    def costs(self, read: LinearCost) -> StepCosts:
        """Return the measured costs of steps, with those of KV reads. Until steps differ, decodes take their mean."""
        decode = self._decodes.line
        if self._decodes.spread < _LEAST_SPREAD:
            decode = LinearCost(self._decodes.mean_y)
        return StepCosts(self.prompt, decode, read)
