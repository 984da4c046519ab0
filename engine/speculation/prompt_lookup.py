"""Prompt lookup: drafts are the tokens that followed the same text before, in the prompt or in the output.

    text      … the red fox ran off … now the red fox ┃ ran off …
                └── suffix ──┘ └ drafts               └ the end

A table per suffix length has the last position of each suffix, in the place that its hash names. Suffixes that share a
place replace each other, so both tables take at most 32 bytes per token of the text, and may miss a suffix. What one
finds is compared with the text.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Tokens of the suffixes that are looked up, the longest first: a longer one is more often continued alike.
SUFFIXES = (6, 3)

_FIRST_SIZE = 1 << 10  # places
_FACTOR = 0x9E3779B1  # odd, about 2³² divided by the golden ratio
_WORD = 0xFFFFFFFF


class PromptLookup:
    """A DraftSource of one sequence, whose text only grows."""

    def __init__(self) -> None:
        self._tables = [_LastPositions(length) for length in SUFFIXES]

    def propose(self, token_ids: array[int], most: int) -> tuple[int, ...]:
        """Return the ``most`` tokens after the last occurrence of a suffix; behind the end of the text it repeats."""
        end = len(token_ids)
        for table in self._tables:
            if start := table.find(token_ids):
                if start + most <= end:
                    return tuple(token_ids[start : start + most])
                return tuple(token_ids[start + at % (end - start)] for at in range(most))
        return ()


class _LastPositions:
    """Where each run of ``length`` tokens ended last, before the end of the text."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._bits = 0
        self._ends = array("I")  # by place; 0: none
        self._known = length - 1  # all runs that end at this position or before are in the table

    def find(self, token_ids: array[int]) -> int:
        """Return where the last ``length`` tokens ended before, 0 if that is not known; then add the new runs."""
        length = self._length
        end = len(token_ids)
        if end < length:
            return 0
        if end - self._known > 64 or 2 * end > len(self._ends):
            self._add_all(token_ids, end - 1)
        for at in range(self._known + 1, end):
            self._ends[self._place(token_ids, at)] = at
        self._known = end - 1
        before = self._ends[self._place(token_ids, end)]
        return before if before and token_ids[before - length : before] == token_ids[end - length :] else 0

    def _place(self, token_ids: array[int], end: int) -> int:
        """Return the place of the run before ``end``."""
        place = 0
        for token_id in token_ids[end - self._length : end]:
            place = ((place ^ token_id) * _FACTOR) & _WORD
        return place >> (32 - self._bits)

    def _add_all(self, token_ids: array[int], end: int) -> None:
        """Make a table with room for more text, with all runs that end at ``end`` or before."""
        import numpy as np  # nodes without drafts do without

        size = max(_FIRST_SIZE, 1 << (2 * end + 2).bit_length())
        self._bits = size.bit_length() - 1
        ends = np.zeros(size, dtype=np.uint32)
        count = end - self._length + 1
        if count > 0:
            tokens: NDArray[np.uint32] = np.array(token_ids, dtype=np.uint32)
            places = np.zeros(count, dtype=np.uint32)
            for at in range(self._length):
                places = (places ^ tokens[at : at + count]) * np.uint32(_FACTOR)
            places >>= np.uint32(32 - self._bits)
            ends[places] = np.arange(self._length, end + 1, dtype=np.uint32)
        self._ends = array("I", ends.tobytes())
        self._known = end
