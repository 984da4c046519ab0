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
