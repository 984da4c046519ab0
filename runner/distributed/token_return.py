"""On the first pipeline stage: tokens that the last one has drawn, or will, until they are in their sequences.

A message has the tokens of one step. It is taken in when one of its sequences goes on, or when there are too many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pdserve.records import ScheduledSequence
from runner.distributed.pipeline_stages import Inlet


@dataclass(frozen=True)
class ReturnedTokens:
    """Where the tokens of a message belong, in the order in which they come."""

    rows: NDArray[np.int64]
    positions: NDArray[np.int64]  # in the sequence of that row
    wanted: NDArray[np.bool_]  # whether it is still that sequence's row


@dataclass(frozen=True)
class _Message:
    number: int
    seqs: tuple[int, ...]
    rows: NDArray[np.int64]
    positions: NDArray[np.int64]


class TokenReturn:
    """What is under way, oldest first; on other stages nothing. Rows are those of whatever table has the sequences."""

    def __init__(self, inlet: Inlet | None) -> None:
        self._inlet = inlet
        self._under_way: deque[_Message] = deque()
        self._number = 0
        self._awaited: dict[int, int] = {}  # by sequence: the message that has its next token

    def expect(self, seqs: Iterable[int], rows: NDArray[np.integer], positions: NDArray[np.integer]) -> None:
        """A step was launched that draws a token for each of ``seqs``, those of ``rows``."""
        if self._inlet is None or not len(rows):
            return
        self._inlet.expect(len(rows))
        self._number += 1
        message = _Message(self._number, tuple(seqs), rows.astype(np.int64), positions.astype(np.int64))
        self._under_way.append(message)
        self._awaited.update(dict.fromkeys(message.seqs, self._number))

    def forget(self, seq: int) -> None:
        """The row of this sequence may be somebody else's from now on."""
        self._awaited.pop(seq, None)

    def due(self, scheduled: tuple[ScheduledSequence, ...]) -> list[ReturnedTokens]:
        """What is to be taken in before a step, by as many calls of ``take``."""
        if self._inlet is None:
            return []
        awaited = self._awaited
        needed = max([awaited.get(item.seq, 0) for item in scheduled]) if awaited else 0
        due = []
        while self._under_way and (self._under_way[0].number <= needed or len(self._under_way) == self._inlet.capacity):
            message = self._under_way.popleft()
            wanted = [awaited.get(seq) == message.number for seq in message.seqs]
            for seq, mine in zip(message.seqs, wanted, strict=True):
                if mine:
                    del awaited[seq]
            due.append(ReturnedTokens(message.rows, message.positions, np.array(wanted)))
        return due

    def take(self) -> AbstractContextManager[Tensor]:
        """The next message that was due: [tokens] int32, on the device."""
        assert self._inlet is not None
        return self._inlet.take()
