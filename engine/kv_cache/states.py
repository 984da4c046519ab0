"""Recurrent states of sequences, as the KV cache manager, peers and tiers see them. state_slots.py explains slots."""

from __future__ import annotations

from collections.abc import Iterable

from engine.kv_cache.block_pool import BlockPool
from engine.sequence import Sequence
from pdserve.kv.states import NO_SLOT, StateOrders


class States:
    """The interface, and a model without recurrent layers. ``pool`` has the slots. Single-threaded."""

    recurrent = False  # whether the model has recurrent layers

    def __init__(self, num_slots: int = 0) -> None:
        self.pool = BlockPool(num_slots)

    def find(self, hashes: list[bytes]) -> tuple[int, int]:
        """Return the blocks of the longest prefix that a sequence can continue, and the slot with the state at its end.

        ``hashes`` belong to the cached blocks. (0, NO_SLOT): no block has a snapshot behind it.
        """
        return len(hashes), NO_SLOT

    def num_lacking(self, sequence: Sequence, source: int) -> int:
        """Return how many slots ``allocate`` lacks at most; 0 or less: none."""
        return 0

    def allocate(self, sequence: Sequence, source: int, num_cached: int, num_matched: int) -> None:
        """Give a sequence a slot, and choose where to take snapshots.

        ``source`` has the state after ``num_cached`` tokens. KV was cached up to ``num_matched`` tokens.
        """

    def launched(self, sequence: Sequence, num_tokens: int) -> None:
        """Order the snapshots amid and behind a step that computes ``num_tokens`` more tokens of a prompt."""

    def decoded(self, sequences: Iterable[Sequence]) -> None:
        """Order snapshots behind a step that decodes these sequences."""

    def take_orders(self, step: int) -> StateOrders:
        """Return the stores and copies of ``step``, which has been planned."""
        return StateOrders()

    def applied(self, step: int) -> None:
        """End ``step``: the slots that it copied from may be overwritten."""

    def settle(self, sequence: Sequence) -> None:
        """Let prefix hits find the snapshots that have been copied by now."""

    def received(self, sequence: Sequence, num_tokens: int) -> int:
        """Take the state after a load of ``num_tokens`` tokens. Return after how many tokens the sequence continues."""
        return num_tokens

    def may_branch(self, sequence: Sequence) -> bool:
        """Return whether another choice can begin with the state of a sequence at the end of its prompt."""
        return True

    def branch(self, sequence: Sequence, choice: Sequence) -> None:
        """Let another choice begin with this state, which ``may_branch``."""

    def take_lease(self, sequence: Sequence) -> int:
        """Make a lease of the state that the peer needs, beyond the end of the sequence; return its slot.

        NO_SLOT: no step has written it, so the peer refuses the lease and computes the prompt.
        """
        return NO_SLOT

    def free(self, sequence: Sequence) -> None:
        """Free the slots of a sequence. No step may be in flight."""
