"""Log-probabilities of tokens, and the range of those that another process sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

#: Rounding takes a probability above 1, and its logarithm above 0. NaN is not below it.
MOST_LOGPROB = 1.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities of the model's raw distribution at one output position."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of some prompt tokens, each given the tokens before it. The first token has none.

    ``table`` has 2 + 2 × ``num_top`` words of 32 bits per token, little-endian: the token's log-probability (float),
    its rank (1 is the best), the ids of the best tokens, and their log-probabilities (float).
    """

    first: int  # index in the prompt
    num_top: int
    table: bytes

    @property
    def end(self) -> int:
        """Index after the last token of the table."""
        return self.first + len(self.table) // self.row_bytes(self.num_top)

    def parts(self, num_bytes: int) -> Iterator[PromptLogprobs]:
        """Yield the rows in order, in tables of at most ``num_bytes``."""
        row = self.row_bytes(self.num_top)
        step = num_bytes // row * row
        for start in range(0, len(self.table), step):
            yield PromptLogprobs(self.first + start // row, self.num_top, self.table[start : start + step])

    @staticmethod
    def row_bytes(num_top: int) -> int:
        return 4 * (2 + 2 * num_top)


# ---------------------------------------------------------------- scheduler → connector


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
