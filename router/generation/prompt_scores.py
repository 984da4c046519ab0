"""Log-probabilities of a prompt's tokens, as they come from a decode node and as clients see them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from pdserve.errors import NodeError
from pdserve.records import PromptLogprobs
from router.http.logprob_formats import LOWEST, TokenLogprob
from router.text.tokenizer import Tokenizer


class PromptScores:
    """Of one prompt, run by run. Those of a node that is lost on the way are told again, from the beginning."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._runs: list[PromptLogprobs] = []

    def add(self, run: PromptLogprobs) -> None:
        """Raises NodeError for what does not follow."""
        if run.first == 1:
            self._runs.clear()
        if run.first != self._end or len(run.table) % run.row_bytes(run.num_top) or run.end > len(self._token_ids):
            told = f"{run.first} … {run.end - 1} where {self._end} is the next of {len(self._token_ids)}"
            raise NodeError(f"the decode node sent log-probabilities of prompt tokens {told}")
        self._runs.append(run)

    @property
    def complete(self) -> bool:
        """Whether every token but the first has its own."""
        return self._end == len(self._token_ids)

    @property
    def _end(self) -> int:
        return self._runs[-1].end if self._runs else 1

    def tokens(self, offsets: Sequence[int]) -> list[TokenLogprob]:
        """All tokens, as they precede an output; ``offsets`` are where their texts begin."""
        first, *others = zip(self._token_ids, offsets, strict=True)
        scored = zip(others, self._rows(), strict=True)
        return [
            TokenLogprob(*first, None, []),
            *(TokenLogprob(token_id, at, own, best) for (token_id, at), (own, _, best) in scored),
        ]

    def to_json(self, tokenizer: Tokenizer, num_top: int) -> list[dict[str, Any] | None]:
        """In vLLM's form: of each token an object, by id, of the token itself and the ``num_top`` best ones."""
        found: list[dict[str, Any] | None] = [None]
        for token_id, (own, rank, best) in zip(self._token_ids[1:], self._rows(), strict=True):
            entries = {str(token_id): _entry(tokenizer, token_id, own, rank)}
            for place, (other, logprob) in enumerate(best[:num_top], 1):
                entries.setdefault(str(other), _entry(tokenizer, other, logprob, place))
            found.append(entries)
        return found

    def _rows(self) -> Iterator[tuple[float, int, list[tuple[int, float]]]]:
        """Log-probability and rank of each token but the first, and the best ones with theirs."""
        for run in self._runs:
            num_top = run.num_top
            for own, rank, *best in struct.iter_unpack(f"<fI{num_top}I{num_top}f", run.table):
                values = [max(value, LOWEST) for value in best[num_top:]]
                yield max(own, LOWEST), rank, list(zip(best[:num_top], values, strict=True))


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    text = tokenizer.token_bytes(token_id).decode(errors="replace")
    return {"logprob": logprob, "rank": rank, "decoded_token": text}
