"""How many random examples a test takes: with ``-m "not slow"``, as in scripts/test, a third, but 5 at least."""

from __future__ import annotations

from hypothesis import settings

#: Set by tests/conftest.py before it imports tests.
share = 1.0


def examples(number: int) -> settings:
    """Return a decorator for a test with random input."""
    return settings(max_examples=max(min(number, 5), round(number * share)))
