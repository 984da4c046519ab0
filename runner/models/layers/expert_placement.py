"""Which shards hold copies of which experts. Pure: equal loads give equal placements on all shards.

Each shard holds its own experts, whatever the load, and has slots for copies of others. The tokens of an expert are
divided evenly among the shards that hold it, so a copy takes load off the busiest shard.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

UNUSED = -1
_LEAST_GAIN = 0.05  # of the busiest shard's load, for which experts are moved

Placement = tuple[tuple[int, ...], ...]  # by shard: the expert in each of its slots for copies, or UNUSED


def first_placement(num_experts: int, num_shards: int, redundancy: int) -> Placement:
    """Return copies of the experts that follow each shard's own, which keeps equal loads equal."""
    each = num_experts // num_shards
    starts = range(each, num_experts + each, each)
    return tuple(tuple((start + slot) % num_experts for slot in range(redundancy)) for start in starts)


def balanced_placement(loads: Sequence[int], num_shards: int, redundancy: int) -> Placement:
    """Return the placement that copies hot experts of the busiest shard to the least busy ones, until no copy helps.

    ``loads`` are the tokens of each expert. No shard has more load than the busiest one has without copies.
    """
    each = len(loads) // num_shards
    held = [list(range(shard * each, (shard + 1) * each)) for shard in range(num_shards)]
    holders = [[expert // each] for expert in range(len(loads))]
    totals = [float(sum(loads[expert] for expert in experts)) for experts in held]
    while (found := _next_copy(loads, held, holders, totals, each + redundancy)) is not None:
        expert, target = found
        before, after = (loads[expert] / (len(holders[expert]) + more) for more in (0, 1))
        for shard in holders[expert]:
            totals[shard] += after - before
        totals[target] += after
        held[target].append(expert)
        holders[expert].append(target)
    return tuple((*experts[each:], *(UNUSED,) * (each + redundancy - len(experts))) for experts in held)


def busiest_load(loads: Sequence[int], placement: Placement) -> float:
    """Return the load of the busiest shard."""
    num_shards = len(placement)
    each = len(loads) // num_shards
    copies = Counter(expert for slots in placement for expert in slots)
    held = [(*range(shard * each, (shard + 1) * each), *slots) for shard, slots in enumerate(placement)]
    return max(math.fsum(loads[one] / (1 + copies[one]) for one in experts if one != UNUSED) for experts in held)


def next_placement(loads: Sequence[int], current: Placement) -> Placement:
    """Return a placement for these loads; ``current`` unless another is clearly better. Copies that stay keep slots."""
    found = balanced_placement(loads, len(current), len(current[0]))
    if busiest_load(loads, found) >= (1 - _LEAST_GAIN) * busiest_load(loads, current):
        return current
    return tuple(_in_place(old, new) for old, new in zip(current, found, strict=True))


def _next_copy(
    loads: Sequence[int], held: list[list[int]], holders: list[list[int]], totals: list[float], slots: int
) -> tuple[int, int] | None:
    """Return an expert of the busiest shard and a shard with a free slot that stays less busy with a copy of it."""
    busiest = max(range(len(totals)), key=totals.__getitem__)
    for expert in sorted(held[busiest], key=lambda one: loads[one] / len(holders[one]), reverse=True):
        free = [shard for shard, own in enumerate(held) if len(own) < slots and shard not in holders[expert]]
        target = min(free, key=totals.__getitem__, default=None)
        if target is not None and totals[target] + loads[expert] / (len(holders[expert]) + 1) < totals[busiest]:
            return expert, target
    return None


def _in_place(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    """Return the experts of ``new`` with those of ``old`` in their old slots."""
    moved = [expert for expert in new if expert == UNUSED or expert not in old]
    return tuple(expert if expert != UNUSED and expert in new else moved.pop(0) for expert in old)
