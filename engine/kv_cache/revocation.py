"""Which leases of pulls a node takes back when its own requests lack blocks.

Only the blocks of pulls are plain cached blocks: the reader can compute them as well. A handoff's lease has KV that was
computed for its reader, and is never taken back. The youngest leases come first: their reads are the least advanced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from engine.kv_cache.block_pool import BlockPool


class Shortage(NamedTuple):
    """Blocks or slots that an allocation lacks."""

    missing: int  # 0 or less: it lacks none
    kept: Collection[int] = ()  # cached items that the allocation needs itself: no revocation frees them

    def chosen(self, pool: BlockPool, leases: Iterable[tuple[int, Sequence[int]]]) -> list[int] | None:
        """Return the rids of leases that end the shortage, in the given order; None if all together do not.

        ``leases``: rids with their leased items. Leases that free nothing are left out.
        """
        chosen: list[int] = []
        missing = self.missing
        kept = frozenset(self.kept)
        others: dict[int, int] = {}  # remaining leases, by block
        for rid, items in leases:
            if missing <= 0:
                break
            takable = [item for item in items if item not in kept and pool.only_leased(item)]
            for item in takable:
                others[item] = left = others.get(item, pool.num_leases(item)) - 1
                missing -= not left
            if takable:
                chosen.append(rid)
        return chosen if missing <= 0 else None


NO_SHORTAGE = Shortage(0)


class Lacking(NamedTuple):
    """Blocks and slots that a node's own requests lack."""

    blocks: Shortage
    slots: Shortage = NO_SHORTAGE  # slots of recurrent state


FindLacking = Callable[[], Lacking]  # called only if there is a lease to revoke
