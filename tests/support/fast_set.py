"""The share of random examples and of matrices that the fast set of tests, ``-m "not slow"``, runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

#: Part of the random examples that a test takes; tests/conftest.py sets it before it imports tests.
share = 1.0


def examples(number: int) -> settings:
    """Return a decorator for a test with random input: with it, the fast set takes a fifth, but 5 at least."""
    return settings(max_examples=max(min(number, 5), round(number * share)))


def sampled(*axes: Iterable[Any], every: int) -> list[Any]:
    """Return all cells of a matrix as parameters; the fast set has each ``every``-th of a row, a column, and so on."""
    numbered = itertools.product(*(enumerate(axis) for axis in axes))
    return [
        pytest.param(*(value for _, value in cell), marks=[pytest.mark.slow] * (sum(at for at, _ in cell) % every > 0))
        for cell in numbered
    ]
