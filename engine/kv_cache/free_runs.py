"""Free blocks as runs of adjacent ids: blocks allocated together are adjacent and are sent as one range."""

from __future__ import annotations

from itertools import islice

_BEST_FIT_RUNS = 8  # runs of the fitting size class that are compared for the best fit


class FreeRuns:
    """A set of block ids as maximal runs. Each operation is O(log n) in the number of blocks, per run touched."""

    def __init__(self, num_blocks: int, *, filled: bool = True) -> None:
        """Begin with all of ``num_blocks`` ids, or with none of them."""
        self._length: dict[int, int] = {}  # first id → length
        self._first: dict[int, int] = {}  # last id → first id
        self._classes: list[dict[int, None]] = [{} for _ in range(num_blocks.bit_length() + 1)]
        self._count = 0
        if num_blocks and filled:
            self._add_run(0, num_blocks)

    def __len__(self) -> int:
        return self._count

    def add(self, *blocks: int) -> None:
        """Add blocks and join them with their neighbours."""
        first = end = -1  # the current run; -1: none yet
        for block in sorted(blocks):
            if block != end:
                self._join_run(first, end)
                first = block
            end = block + 1
        self._join_run(first, end)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Remove ``count`` blocks, at most ``len(self)``: first the ones after ``after``, then few long runs."""
        assert count <= self._count, (count, self._count)
        taken: list[int] = []
        if after is not None and after + 1 in self._length:
            taken += self._take_from(after + 1, count)
        while len(taken) < count:
            wanted = count - len(taken)
            taken += self._take_from(self._best_run(wanted), wanted)
        return taken

    def _best_run(self, wanted: int) -> int:
        """Return the start of a short run of at least ``wanted`` blocks; if there is none, of one of the longest."""
        size_class = wanted.bit_length()
        if fitting := self._classes[size_class]:
            candidates = [first for first in islice(fitting, _BEST_FIT_RUNS) if self._length[first] >= wanted]
            if candidates:
                return min(candidates, key=self._length.__getitem__)
        larger = self._classes[size_class + 1 :]
        all_from_largest = reversed(self._classes)
        return next(first for runs in (*larger, *all_from_largest) for first in runs)

    def _take_from(self, first: int, count: int) -> list[int]:
        length = self._remove_run(first)
        count = min(count, length)
        if count < length:
            self._add_run(first + count, length - count)
        return list(range(first, first + count))

    def _join_run(self, first: int, end: int) -> None:
        """Add a run, which may be empty, and join it with its neighbours."""
        if first == end:
            return
        if first - 1 in self._first:
            first = self._first[first - 1]
            self._remove_run(first)
        if end in self._length:
            end += self._remove_run(end)
        self._add_run(first, end - first)

    def _add_run(self, first: int, length: int) -> None:
        self._length[first] = length
        self._first[first + length - 1] = first
        self._classes[length.bit_length()][first] = None
        self._count += length

    def _remove_run(self, first: int) -> int:
        length = self._length.pop(first)
        del self._first[first + length - 1]
        del self._classes[length.bit_length()][first]
        self._count -= length
        return length
