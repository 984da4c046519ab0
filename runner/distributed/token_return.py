"""Tokens on their way from the last pipeline stage to the first, until they are in their sequences.

A message holds the tokens of one step. It is received before the next step of one of its sequences, or when the
receiver has no more room.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.records import ScheduledSequence
from runner.distributed.pipeline_stages import TensorReceiver
from runner.step_parts import BatchT_contra, StepFeature


@dataclass(frozen=True)
class ReturnedMessage:
    """The tokens of one step, and where they belong."""

    number: int  # counts messages from 1
    seqs: tuple[int, ...]
    rows: NDArray[np.int64]
    positions: NDArray[np.int64]  # in the sequence of that row
    wanted: NDArray[np.bool_]  # whether the row still belongs to that sequence, once the message is due


class ReturnedTokens(StepFeature[BatchT_contra]):
    """The expected messages, oldest first. Rows belong to the runner's table of sequences."""

    def __init__(self, receiver: TensorReceiver) -> None:
        self.receiver = receiver
        self._expected: deque[ReturnedMessage] = deque()
        self._number = 0
        self._message_of: dict[int, int] = {}  # by sequence: the message with its next token

    def expect(
        self, sampled: tuple[ScheduledSequence, ...], rows: NDArray[np.integer], positions: NDArray[np.integer]
    ) -> None:
        """Expect a token for each sequence that samples, in ``rows``, from the step that was just launched."""
        if not len(rows):
            return
        self.receiver.expect(len(rows))
        self._number += 1
        rows64 = rows.astype(np.int64)
        positions64 = positions.astype(np.int64)
        seqs = tuple(sequence.seq for sequence in sampled)
        message = ReturnedMessage(self._number, seqs, rows64, positions64, np.ones(len(rows), dtype=np.bool_))
        self._expected.append(message)
        self._message_of.update(dict.fromkeys(message.seqs, self._number))

    def remove(self, seq: int) -> None:
        """Drop the tokens of a sequence, whose row may soon belong to another one."""
        self._message_of.pop(seq, None)

    def due(self, scheduled: tuple[ScheduledSequence, ...]) -> list[ReturnedMessage]:
        """Return the messages to receive before a step, each by ``receiver.take``."""
        message_of = self._message_of
        needed = max([message_of.get(item.seq, 0) for item in scheduled]) if message_of else 0
        due = []
        while self._expected and (self._expected[0].number <= needed or len(self._expected) == self.receiver.capacity):
            message = self._expected.popleft()
            for index, seq in enumerate(message.seqs):
                message.wanted[index] = message_of.get(seq) == message.number
                if message.wanted[index]:
                    del message_of[seq]
            due.append(message)
        return due
