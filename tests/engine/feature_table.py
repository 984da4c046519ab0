"""What random worlds draw together: kinds of KV, features, numbers of choices, drafts. Counts of each cell."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

CHOICES = (1, 2, 3)


class Feature(StrEnum):
    HANDOFF = "handoff"
    PULL = "pull"
    SPLIT_PULL = "split pull"
    LEASE = "lease behind a pull"  # for a peer
    HOST = "host tier"
    DISK = "disk tier"
    PREEMPTION = "preemption"
    PAUSE = "pause, resume"
    CANCEL = "cancel"
    MIGRATION = "migration"
    REVOCATION = "revocation"
    WEIGHTS = "weight change"


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"windows": (None, 6)},  # or others
    "latent": {"latent": True},
    "recurrent": {"state_slots": 0},  # as drawn
}
Cell = tuple[str, Feature, int, bool]  # kind, feature, choices, drafts
CELLS: list[Cell] = list(itertools.product(KINDS, Feature, CHOICES, (False, True)))
#: Kinds and features that exclude each other, with the reason.
IMPOSSIBLE = {
    ("window", Feature.SPLIT_PULL): "blocks of windows have no place before a load ends",
    ("recurrent", Feature.SPLIT_PULL): "a recurrent state is that of all tokens before it",
}


def aim_of(number: int) -> Cell:
    """Return the cell that a world aims at: each of them once in as many worlds, and neighbours are unlike."""
    return CELLS[number * 97 % len(CELLS)]


def is_possible(cell: Cell) -> bool:
    return cell[:2] not in IMPOSSIBLE


def missing(counts: Counter[Cell]) -> list[Cell]:
    """Return the cells that have not been drawn and are possible."""
    return [cell for cell in CELLS if is_possible(cell) and not counts[cell]]


def table(counts: Counter[Cell], pairs: Counter[frozenset[Feature]]) -> str:
    """Return the counts of all cells, and of all pairs of features."""
    lines = []
    for kind in KINDS:
        columns = [(n, drafts) for drafts in (False, True) for n in CHOICES]
        heads = "".join(f"{f'n={n}' + ' drafts' * drafts:>13}" for n, drafts in columns)
        lines.append(f"{kind:24}{heads}")
        for feature in Feature:
            cells: Iterator[Cell] = ((kind, feature, n, drafts) for n, drafts in columns)
            counted = "".join(f"{counts[cell] if is_possible(cell) else '-':>13}" for cell in cells)
            lines.append(f"  {feature:22}{counted}")
    lines += [f"- {kind}, {feature}: {reason}" for (kind, feature), reason in IMPOSSIBLE.items()]
    lines.append("requests that have met two features")
    for index, feature in enumerate(Feature):
        before = itertools.islice(Feature, index)
        lines.append(f"  {feature:22}" + "".join(f"{pairs[frozenset((other, feature))]:>8}" for other in before))
    return "\n".join(lines)
