"""The recurrent state of a sequence: its slots, and where snapshots of it are taken.

``engine/kv_cache/state_slots.py`` explains both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.state import NO_SLOT


@dataclass(slots=True)
class SequenceState:
    slot: int
    source: int = NO_SLOT  # the snapshot that it starts from, until a step has been planned with it
    lease_slot: int = NO_SLOT  # on P: for the copy that the peer reads, until that is leased
    lease_at: int = 0  # tokens after which the copy is made
    stops: list[int] = field(default_factory=list)  # tokens after which snapshots are taken, descending
    pending: list[tuple[int, int]] = field(default_factory=list)  # (tokens, slot) of snapshots in steps in flight
    decode_distance: int = 1  # tokens between snapshots while it decodes
    decode_hash: bytes = b""  # of the latest one of these

    def limit(self, num_launched: int, num_tokens: int) -> int:
        """Return the tokens of a chunk of at most ``num_tokens``: with a snapshot amid it, and another at its end."""
        return min(num_tokens, self.stops[-2] - num_launched) if len(self.stops) > 1 else num_tokens

    def passed(self, num_tokens: int) -> None:
        """So many tokens have been loaded: snapshots before their end are not taken."""
        while self.stops and self.stops[-1] <= num_tokens:
            self.stops.pop()

    def draft_limit(self, num_tokens: int) -> int:
        """Return how many drafts a decode behind ``num_tokens`` tokens may have.

        A snapshot is of the state at its very token, and ordered before drafts are verified: so none is among drafts.
        """
        return max(0, self.decode_distance - num_tokens % self.decode_distance - 2)

    def start_from(self, source: int, slot: int) -> None:
        """Begin with a copy of the state in ``source``."""
        self.source, self.slot = source, slot

    @property
    def start(self) -> int:
        """The slot that has its state before its first step."""
        return self.slot if self.source == NO_SLOT else self.source
