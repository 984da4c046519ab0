"""Features together: random worlds of three nodes, whose every token is right, and where nothing stays held."""

from __future__ import annotations

from collections import Counter

import pytest
from feature_table import CELLS, Cell, Feature, missing, table
from feature_world import run_world

SEED = 1
MOST_WORLDS = 12 * len(CELLS)


@pytest.mark.parametrize("number", range(12))
def test_requests_that_meet_several_features_are_exact(number: int) -> None:
    run_world(SEED, number, Counter(), Counter())


def test_a_world_follows_from_its_seed() -> None:
    first = Counter[Cell]()
    second = Counter[Cell]()
    run_world(SEED, 6, first, Counter())
    run_world(SEED, 6, second, Counter())
    assert first == second
    assert first.total()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_feature_is_drawn_with_every_kind_of_kv_with_choices_and_drafts() -> None:
    counts = Counter[Cell]()
    pairs = Counter[frozenset[Feature]]()
    for number in range(MOST_WORLDS):
        run_world(SEED, number, counts, pairs)
        if not missing(counts):
            break
    assert not missing(counts), table(counts, pairs)
