"""The range of log-probabilities that another process sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

#: Rounding takes a probability above 1, and its logarithm above 0. NaN is not below it.
MOST_LOGPROB = 1.0


class Logprobs(Protocol):
    """TokenLogprobs, the record or the message."""

    @property
    def logprob(self) -> float: ...

    @property
    def top_ids(self) -> Sequence[int]: ...

    @property
    def top_logprobs(self) -> Sequence[float]: ...


def logprobs_fault(logprobs: Logprobs, asked: int, vocab_size: int) -> str:
    """Return the fault of an answer to a request for ``asked`` alternatives (-1: none); empty if correct."""
    num_top = len(logprobs.top_ids)
    if num_top != len(logprobs.top_logprobs) or num_top > max(asked, 0):
        return (
            f"{num_top} alternatives with {len(logprobs.top_logprobs)} log-probabilities, where {asked} were asked for"
        )
    for logprob in (logprobs.logprob, *logprobs.top_logprobs):
        if not logprob <= MOST_LOGPROB:
            return f"a log-probability of {logprob}"
    if num_top and (largest := max(logprobs.top_ids)) >= vocab_size:
        return f"a log-probability of token {largest}; the largest token id is {vocab_size - 1}"
    return ""
