"""Live sequences by row of a runner's tables."""

from __future__ import annotations

from abc import ABC, abstractmethod

from pdserve.records import NewSequence


class SequenceRows(ABC):
    """Gives each live sequence a row. A row is free again as soon as its sequence is removed."""

    def __init__(self, count: int) -> None:
        self._row_of: dict[int, int] = {}
        self._free = list(range(count - 1, -1, -1))
        self._records: list[NewSequence | None] = [None] * count

    def add(self, new: NewSequence) -> int:
        """Give a sequence a row, and return the row."""
        assert new.seq not in self._row_of, f"sequence {new.seq} was added twice"
        assert self._free, "more sequences than rows"
        row = self._row_of[new.seq] = self._free.pop()
        self._records[row] = new
        return row

    @abstractmethod
    def add_blocks(self, seq: int, block_ids: tuple[int, ...]) -> None: ...

    def remove(self, seq: int) -> None:
        """Forget a sequence. An unknown one is ignored: it was never scheduled."""
        row = self._row_of.pop(seq, None)
        if row is not None:
            self._records[row] = None
            self._free.append(row)

    def record(self, row: int) -> NewSequence:
        record = self._records[row]
        assert record is not None
        return record
