"""Copies of the last block of a prompt, for choices that cannot compute its tokens again.

The choices of a request share the full blocks of its prompt. Each writes its own tokens behind the prompt, so each has
a block of its own for the prompt's last tokens. These are computed again, unless they belong to an image: a node that
encodes no images has only their KV. Then a choice begins with a copy of the block:

    the prompt's blocks   ████ ████ ██▌▏ choice 0 goes on here
                          shared    └──copied before the first step of──► ██▌ choice 1

Copies run in the order of the device's stream. Transfers do not: so a source stays held until the step has been
applied, also if choice 0 ends before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.kv_cache.block_pool import BlockPool, Use
from engine.sequence_parts import BlockTable


class BlockCopies:
    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._planned: list[int] = []  # sources for the step being planned; block tables append to it
        self._in_flight: deque[tuple[int, list[int]]] = deque()  # (step, sources)

    def order(self, table: BlockTable, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy held blocks into ``targets`` before the first step of the sequence with ``table``."""
        self._pool.hold(sources)
        table.order_copies(tuple(zip(sources, targets, strict=True)), self._planned)

    def cancel(self, table: BlockTable) -> None:
        """Drop the copies of a sequence that no step has begun with."""
        self._pool.drop([source for source, _ in table.copies], Use.HELD)
        table.order_copies((), self._planned)

    def planned(self, step: int) -> None:
        """``step`` has been planned."""
        if self._planned:
            self._in_flight.append((step, self._planned.copy()))
            self._planned.clear()

    def applied(self, step: int) -> None:
        """``step`` has ended: the blocks that it copied from may be overwritten."""
        while self._in_flight and self._in_flight[0][0] <= step:
            self._pool.drop(self._in_flight.popleft()[1], Use.HELD)
