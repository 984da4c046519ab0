"""Queue of sequences that wait for blocks: by the priority of their requests, then fair between clients.

A sequence costs its prompt tokens that are not cached, when it is admitted, and its output tokens, when it ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.request import Request
from engine.sequence import Sequence
from pdserve.fairness.fair_queue import FairQueue

_QUANTUM = 64  # tokens per client and round


def _streams_wait(sequence: Sequence) -> bool:
    return not sequence.is_new


class WaitingQueue:
    def __init__(self) -> None:
        self._queue = FairQueue[int, Sequence](_QUANTUM)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    @property
    def head(self) -> Sequence | None:
        """The sequence to admit next."""
        return self._queue.head

    def append(self, sequence: Sequence) -> None:
        """Add after the waiting sequences of its client and priority."""
        self._queue.push(sequence, sequence.request.client, sequence.request.priority)

    def appendleft(self, sequence: Sequence) -> None:
        """Add before the waiting sequences of its client and priority."""
        self._queue.push(sequence, sequence.request.client, sequence.request.priority, first=True)

    def advance(self, sequences: Iterable[Sequence]) -> None:
        """Put new prompts, in their order, before other new ones of their client and priority."""
        for sequence in reversed(list(sequences)):
            self._queue.advance(sequence, sequence.request.client, sequence.request.priority, stays=_streams_wait)

    def admit(self, sequence: Sequence, cached: int) -> None:
        """Remove a sequence that is admitted; its first ``cached`` tokens are free."""
        uncharged_hits = max(0, cached - sequence.charged)
        cost = sequence.charge_tokens() - uncharged_hits
        self._queue.take(sequence, sequence.request.client, sequence.request.priority, cost)

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError if the sequence is not queued."""
        self._queue.remove(sequence, sequence.request.client, sequence.request.priority)

    def charge_output(self, sequence: Sequence) -> None:
        """Charge the client for the output of a sequence that ran, and not twice."""
        self._queue.charge(sequence.request.client, sequence.charge_tokens())

    def pass_turn(self) -> None:
        """Let the next client have its turn."""
        self._queue.pass_turn()

    def to_refuse(self, request: Request) -> Sequence | None:
        """Return the sequence to refuse so that ``request`` may wait in a full queue; None: refuse ``request``."""
        sequence = self._queue.to_reject(request.client, request.priority)
        if sequence is None or sequence.has_output or sequence.request.cached_tokens is not None:
            return None
        return sequence
