"""Log-probabilities of many tokens in columns: 16 bytes per token and 8 per alternative."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence

from router.generation.token_logprob import TokenLogprob

_ROWS = 64  # rows that exist as objects at once


class LogprobTable:
    """``token_ids``, ``offsets`` and ``logprobs`` have one item per token; a log-probability of NaN stands for none."""

    def __init__(self) -> None:
        self.token_ids = array("I")
        self.offsets = array("I")  # begin of each token's text, in characters
        self.logprobs = array("f")
        self.ends = array("I")  # end of each token's alternatives in the next two columns
        self.top_ids = array("I")
        self.top_logprobs = array("f")

    def add(self, token: TokenLogprob) -> None:
        self.token_ids.append(token.token_id)
        self.offsets.append(token.offset)
        self.logprobs.append(math.nan if token.logprob is None else token.logprob)
        for token_id, logprob in token.alternatives:
            self.top_ids.append(token_id)
            self.top_logprobs.append(logprob)
        self.ends.append(len(self.top_ids))

    def batches(self) -> Iterator[list[TokenLogprob]]:
        """Yield the tokens, a bounded number at a time."""
        for start in range(0, len(self.token_ids), _ROWS):
            yield [self._row(index) for index in range(start, min(start + _ROWS, len(self.token_ids)))]

    def _row(self, index: int) -> TokenLogprob:
        start = self.ends[index - 1] if index else 0
        end = self.ends[index]
        alternatives = list(zip(self.top_ids[start:end], self.top_logprobs[start:end], strict=True))
        logprob = self.logprobs[index]
        own = None if math.isnan(logprob) else logprob
        return TokenLogprob(self.token_ids[index], self.offsets[index], own, alternatives)


def all_batches(tables: Sequence[LogprobTable]) -> Iterator[list[TokenLogprob]]:
    """Yield the tokens of all tables."""
    for table in tables:
        yield from table.batches()
