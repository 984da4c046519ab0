"""Room for clients with few sequences: another client must not keep all slots or blocks, or make each step long."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from engine.scheduler.live_sequences import LiveSequences
from engine.scheduler.room import Room
from engine.sequence import Sequence
from pdserve.ipc.messages import Totals

_LINGER = 128  # steps, about a second: a client with one request after the other is beside another all the time
_PATIENCE = 32  # steps; a node whose sequences end regularly never preempts for fairness


class FairShare:
    """Chooses a sequence to preempt, and the client whose prompts a step limits.

    A sequence is preempted when the head of the queue has found no room for ``_PATIENCE`` steps. It is the last of the
    client with the most sequences, if these are more than twice as many as the client of the head would have. So two
    clients never preempt each other alternately, and no client loses its only sequence.
    """

    def __init__(self, live: LiveSequences, room: Room, totals: Totals) -> None:
        self._live = live
        self._room = room
        self._totals = totals
        self._head: Sequence | None = None
        self._crowded: tuple[int | None, int] = (None, 0)  # client, and the last step in which others decoded beside it
        self._since = 0  # step at which the head became the head, or room was last made for it

    def make_room(self, step: int, in_flight: bool) -> bool:
        """Preempt for the head of the queue if that is fair. Return False while steps in flight prevent that."""
        sequence = self._to_preempt(step)
        if sequence is not None:
            if in_flight:
                return False
            self._room.preempt(sequence)
            self._totals.fair_preemptions += 1
            self._since = step
        return True

    def _to_preempt(self, step: int) -> Sequence | None:
        """Return the sequence to preempt now. If the client of the head has the most itself, its turn ends."""
        head = self._live.waiting.head
        if head is not self._head:
            self._head = head
            self._since = step
        if head is None or step - self._since < _PATIENCE:
            return None
        if head.blocked or self._room.lacks_slot(head):
            self._since = step
            return None
        if self._room.free_places <= 0 or not self._room.may_have_blocks(head):
            counts = self._live.counts()
            own = head.request.client
            victim = self._live.least_urgent
            client = own if victim is None else victim.request.client
            if victim is not None and client != own and counts[client] > 2 * (counts[own] + 1):
                if victim.request.priority >= head.request.priority:
                    return victim
            elif counts[own] and counts[own] == max(counts.values()):
                self._live.waiting.pass_turn()
        self._since = step
        return None

    def crowding(self, sequence: Sequence, step: int) -> int | None:
        """Return the client whose prompts this step limits, or None. ``sequence`` is the first prompt of the step.

        Its requests have more than twice as many choices as all other requests, one of which decodes or loads its KV
        now or has within ``_LINGER`` steps.
        """
        client, beside_others = self._largest(sequence)
        crowded, since = self._crowded
        return client if beside_others or (client == crowded and step - since < _LINGER) else None

    def take_prompt(self, sequence: Sequence, step: int) -> int | None:
        """Return ``crowding`` for the first prompt of a step that is taken, and remember it for later steps."""
        client, beside_others = self._largest(sequence)
        if beside_others:
            self._crowded = client, step
        crowded, since = self._crowded
        return client if client == crowded and step - since < _LINGER else None

    def _largest(self, sequence: Sequence) -> tuple[int | None, bool]:
        """Return the client with most of the choices, if any, and whether sequences of others decode or load now.

        ``sequence`` is counted even if it does not run yet.
        """
        running = self._live.running.values()
        loading = self._live.loading.values()
        choices = Counter[int]()
        for request in {sequence.request, *(other.request for other in chain(running, loading))}:
            choices[request.client] += request.sampling.n
        client, most = choices.most_common(1)[0]
        if most <= 2 * (choices.total() - most):
            return None, False
        decodes = (sequence for sequence in running if sequence.decodes_here)
        beside = most < choices.total() and any(
            sequence.request.client != client for sequence in chain(decodes, loading)
        )
        return client, beside
