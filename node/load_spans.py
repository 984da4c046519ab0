"""Spans and attributes for KV that a node loads, pulls or computes (docs/traces.md).

Attributes hold numbers of tokens and predicted seconds; unknown values are left out. The duration of a span is the
measured time.
"""

from __future__ import annotations

import time

from pdserve.ipc.messages import Fetched
from pdserve.request_cost import LoadPlan, StepCosts, pull_seconds
from pdserve.tracing.spans import Attributes, Span, Value


def record_fetch(span: Span, fetched: Fetched) -> None:
    """Record a load from host memory or disk that has just ended."""
    now = time.monotonic()
    attributes: Attributes = {"pdserve.load.medium": fetched.medium, "pdserve.load.tokens": fetched.num_tokens}
    times = _known("pdserve.load.", expected=fetched.expected, computing=fetched.computing)
    span.child("load", {**attributes, **times}, start=now - fetched.seconds).end(now)


def pull_attributes(costs: StepCosts, num_tokens: int, plan: LoadPlan | None = None) -> dict[str, Value]:
    """Return the predictions for ``num_tokens`` tokens that a peer has, by ``costs`` and ``plan``.

    Without a plan, they are for a pull of all tokens.
    """
    plan = plan or LoadPlan(0, num_tokens, pull_seconds(costs, num_tokens))
    expected = plan.seconds if costs.read else 0.0
    times = _known("pdserve.pull.", expected=expected, computing=costs.prompt.slope * num_tokens)
    beside = _known("pdserve.pull.", computed_tokens=plan.computed)
    return {"pdserve.pull.expected_tokens": plan.loaded, **beside, **times}


def prefill_attributes(costs: StepCosts, num_tokens: int) -> dict[str, Value]:
    """Return the size of a computed prompt, and its predicted time on a node without other work."""
    expected = costs.prompt.at(num_tokens) if costs.prompt else 0.0
    return {"pdserve.prefill.tokens": num_tokens, **_known("pdserve.prefill.", expected=expected)}


def _known(prefix: str, **values: float) -> dict[str, Value]:
    return {f"{prefix}{name}": value for name, value in values.items() if value}
