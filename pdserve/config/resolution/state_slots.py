"""Choose how many slots of recurrent state a node has beside its KV blocks (pdserve/kv/states.py)."""

from __future__ import annotations

from pdserve.kv.layout import KVLayout
from pdserve.kv.states import LEAST_SLOTS, StateLayout

TYPICAL_TOKENS = 4096  # assumed tokens per sequence, to divide memory between KV and states
_SNAPSHOTS = 64  # slots for snapshots, beside two for each running sequence


def most_slots(max_num_seqs: int) -> int:
    """Return the most slots that are of use: two per running sequence, and snapshots of others."""
    return 2 * max_num_seqs + _SNAPSHOTS


def choose_slots(memory: int, layout: KVLayout, states: StateLayout, max_num_seqs: int) -> int:
    """Return the slots of a rank with ``memory`` bytes for KV and states together.

    As many as sequences of ``TYPICAL_TOKENS`` fit, within ``LEAST_SLOTS`` and ``most_slots``. The numbers of blocks
    and slots in the two layouts do not matter.
    """
    slots = memory // bytes_per_sequence(layout, states)
    return min(max(slots, LEAST_SLOTS), most_slots(max_num_seqs))


def bytes_per_sequence(layout: KVLayout, states: StateLayout) -> int:
    """Return the bytes of KV and state of a sequence of ``TYPICAL_TOKENS``."""
    return TYPICAL_TOKENS * layout.bytes_per_token + states.slot_bytes
