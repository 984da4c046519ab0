"""The recurrent state of a sequence: its slots, and where snapshots of it are taken.

``engine/recurrent/state_slots.py`` explains both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.kv.states import NO_SLOT


@dataclass(slots=True)
class SequenceState:
    """``source`` belongs to the next step of any kind: ``begin`` takes it, and only the runner is told it."""

    slot: int  # its own slot, which steps overwrite
    copied_from: list[int]  # ``StateSlots`` has this list: sources of the step that is planned, of all sequences
    source: int = NO_SLOT  # the snapshot that its next step begins with a copy of; NO_SLOT: ``slot`` has the state
    spare: int = NO_SLOT  # on P: empty, for the copy that the peer reads
    lease_slot: int = NO_SLOT  # on P: slot that the peer reads; it has the state, or a planned step writes it there
    lease_at: int = 0  # tokens after which the peer needs the state
    stops: list[int] = field(default_factory=list)  # tokens after which snapshots are taken, descending
    pending: list[tuple[int, int]] = field(default_factory=list)  # (tokens, slot) of snapshots in steps in flight
    decode_distance: int = 1  # tokens between snapshots while it decodes
    decode_hash: bytes = b""  # hash of the latest snapshot while it decodes

    def limit(self, num_launched: int, num_tokens: int) -> int:
        """Return the tokens of a chunk of at most ``num_tokens``: with a snapshot amid it, and another at its end."""
        return min(num_tokens, self.stops[-2] - num_launched) if len(self.stops) > 1 else num_tokens

    def passed(self, num_tokens: int) -> None:
        """Drop the snapshots of the first ``num_tokens`` tokens, which have been loaded."""
        while self.stops and self.stops[-1] <= num_tokens:
            self.stops.pop()

    def draft_limit(self, num_tokens: int) -> int:
        """Return how many drafts a decode behind ``num_tokens`` tokens may have.

        A snapshot holds the state at one token, and is ordered before drafts are verified: so none is among drafts.
        """
        return max(0, self.decode_distance - num_tokens % self.decode_distance - 2)

    def start_from(self, source: int, slot: int) -> None:
        """Let the next step begin with a copy of the state in ``source``."""
        self.source = source
        self.slot = slot

    def begin(self) -> int:
        """Let the step that is planned begin with its state. Return the slot that has it.

        A snapshot that is copied from stays held until the step has been applied.
        """
        source = self.source
        self.source = NO_SLOT
        if source == NO_SLOT:
            return self.slot
        self.copied_from.append(source)
        return source

    def take_spare(self) -> int:
        """Let the peer read the spare slot, which the step that is planned writes. Return it."""
        self.lease_slot = self.spare
        self.spare = NO_SLOT
        return self.lease_slot

    def lease_received(self) -> None:
        """Let the peer read the slot that a load has filled, and go on in the spare one."""
        self.lease_slot = self.slot
        self.start_from(self.slot, self.spare)
        self.spare = NO_SLOT

    def give_up_slot(self) -> None:
        """A transfer may still write to its own slot: the slot is no longer part of it."""
        self.slot = NO_SLOT

    @property
    def slots(self) -> list[int]:
        """All slots that it holds."""
        slots = [self.slot, self.source, self.spare, self.lease_slot, *(slot for _, slot in self.pending)]
        return [slot for slot in slots if slot != NO_SLOT]
