"""Log-probabilities of a prompt's tokens, as a decode node sends them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from pdserve.errors import NodeError
from pdserve.records import PromptLogprobs
from router.generation.token_logprob import LOWEST, TokenLogprob


class PromptScores:
    """Of one prompt, run by run. Those of a node that is lost on the way are told again, from the beginning."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self._runs: list[PromptLogprobs] = []

    def add(self, run: PromptLogprobs) -> None:
        """Raises NodeError for what does not follow."""
        if run.first == 1:
            self._runs.clear()
        if run.first != self._end or len(run.table) % run.row_bytes(run.num_top) or run.end > len(self.token_ids):
            told = f"{run.first} … {run.end - 1} where {self._end} is the next of {len(self.token_ids)}"
            raise NodeError(f"the decode node sent log-probabilities of prompt tokens {told}")
        self._runs.append(run)

    @property
    def complete(self) -> bool:
        """Whether every token but the first has its own."""
        return self._end == len(self.token_ids)

    @property
    def _end(self) -> int:
        return self._runs[-1].end if self._runs else 1

    def tokens(self, offsets: Sequence[int]) -> list[TokenLogprob]:
        """All tokens, as they precede an output; ``offsets`` are where their texts begin."""
        first, *others = zip(self.token_ids, offsets, strict=True)
        scored = zip(others, self.rows(), strict=True)
        return [
            TokenLogprob(*first, None, []),
            *(TokenLogprob(token_id, at, own, best) for (token_id, at), (own, _, best) in scored),
        ]

    def rows(self) -> Iterator[tuple[float, int, list[tuple[int, float]]]]:
        """Log-probability and rank of each token but the first, and the best ones with theirs."""
        for run in self._runs:
            num_top = run.num_top
            for own, rank, *best in struct.iter_unpack(f"<fI{num_top}I{num_top}f", run.table):
                values = [max(value, LOWEST) for value in best[num_top:]]
                yield max(own, LOWEST), rank, list(zip(best[:num_top], values, strict=True))
