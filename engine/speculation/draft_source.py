"""Where drafts come from (docs/speculation.md)."""

from __future__ import annotations

from array import array
from typing import Protocol


class DraftSource(Protocol):
    """Guesses the next tokens of one sequence."""

    def propose(self, token_ids: array[int], most: int) -> tuple[int, ...]:
        """Return up to ``most`` tokens that may follow ``token_ids``, which are the prompt and the output so far.

        ``most`` is at least 1. Each call has the tokens of the call before, and further ones.
        """


class ModelDrafts:
    """A DraftSource with the tokens that the model has predicted behind the last step of a sequence."""

    def __init__(self) -> None:
        self._num_tokens = 0  # tokens before the drafts
        self._drafts: tuple[int, ...] = ()

    def put(self, num_tokens: int, drafts: tuple[int, ...]) -> None:
        """Keep the drafts that follow the first ``num_tokens`` tokens."""
        self._num_tokens = num_tokens
        self._drafts = drafts

    def propose(self, token_ids: array[int], most: int) -> tuple[int, ...]:
        return self._drafts[:most] if len(token_ids) == self._num_tokens else ()
