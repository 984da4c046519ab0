"""Triton's kernels of adapters add what plain torch adds, and touch no other row; tiles hold each token once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fast_set import examples
from hypothesis import given
from hypothesis import strategies as st

from pdserve.adapters.adapter import AdapterLimits
from runner.batch import ADAPTER_TILE
from runner.models.adapters.slots import AdapterSlots, LowRankPart
from runner.models.adapters.token_slots import TokenSlots
from runner.placement import TensorPlacement

CPU = torch.device("cpu")
OUTPUTS = (70, 130, 3)
IN_FEATURES = 600  # two parts of the inputs
RANKS = ((20, 3, 1), (5, 0, 16), (0, 24, 0), (0, 0, 0))  # by slot and projection


def slots_of(use_triton: bool) -> AdapterSlots:
    placement = TensorPlacement(CPU, torch.float32, torch.float32, use_triton=use_triton)
    slots = AdapterSlots(AdapterLimits(4, 24, 4), placement, max_tokens=64)
    slots.add(8, (16,))  # another layer before it
    slots.add(IN_FEATURES, OUTPUTS)
    slots.allocate()
    generator = torch.Generator().manual_seed(1)
    for slot, ranks in enumerate(RANKS):
        parts = [
            LowRankPart(
                1,
                member,
                a=torch.randn(rank, IN_FEATURES, generator=generator) / IN_FEATURES**0.5,
                b=torch.randn(rank, size, generator=generator),
            )
            for member, (rank, size) in enumerate(zip(ranks, OUTPUTS, strict=True))
            if rank
        ]
        slots.write(slot, parts)
    return slots


@pytest.mark.parametrize("padding", [0, 5])
def test_kernels_add_the_deltas_of_plain_torch(padding: int) -> None:
    of_tokens = np.array([0, -1, 1, 0, 2, 3, -1, *[1] * 18, 0], dtype=np.int32)
    kept = of_tokens[[3, 4, 6]]
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(len(of_tokens) + padding, IN_FEATURES, generator=generator)
    base = torch.randn(len(x), sum(OUTPUTS), generator=generator)
    results = []
    of_kept = []
    for use_triton in (True, False):
        slots = slots_of(use_triton)
        slots.tokens.put(of_tokens, kept)
        y = base.clone()
        slots.layers[1].add_delta(x, y)
        results.append(y)
        y = base[:3].clone()
        slots.layers[1].add_delta(x[[3, 4, 6]], y)
        of_kept.append(y)
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(of_kept[0], of_kept[1], rtol=1e-4, atol=1e-4)
    untouched = [*np.flatnonzero((of_tokens < 0) | (of_tokens == 3)), *range(len(of_tokens), len(x))]
    assert torch.equal(results[0][untouched], base[untouched])
    changed = np.flatnonzero((of_tokens >= 0) & (of_tokens < 3))
    assert bool((results[0][changed] != base[changed]).any(dim=1).all())


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=200))
@examples(100)
def test_tiles_hold_each_token_with_an_adapter_once(slots: list[int]) -> None:
    of_tokens = np.array(slots, dtype=np.int32)
    tokens = TokenSlots(200, 6, CPU, use_triton=True)
    tokens.put(of_tokens, of_tokens)
    assert tokens.active == bool((of_tokens >= 0).any())
    if not tokens.active:
        return
    tiles, order, num_tiles = tokens.tiles(len(slots))
    listed = []
    for number, (slot, first, count) in enumerate(tiles.tolist()):
        assert count == 0 or number < num_tiles, "a kernel does not look at the tile"
        assert count <= ADAPTER_TILE
        listed += [(slot, token) for token in order[first : first + count].tolist()]
    assert sorted(listed) == sorted((slot, token) for token, slot in enumerate(slots) if slot >= 0)
