"""Shares of GPU memory: what a node gets beside other processes on the same GPU."""

from __future__ import annotations

import pytest

from runner.loading.memory import MemoryUse

GIB = 1 << 30
RESERVE = 1 * GIB  # at most


def use_beside(other: int) -> MemoryUse:
    """16 GiB of weights and 4 more for a step on a GPU of 140 GiB, of which ``other`` bytes are used elsewhere."""
    free = 140 * GIB - 17 * GIB - other
    return MemoryUse(140 * GIB, free, allocated=16 * GIB, peak=20 * GIB, graphs=GIB, libraries=GIB)


def test_second_node_of_a_gpu_gets_as_much_as_the_first() -> None:
    first = use_beside(0).room_for_kv(0.45)
    second = use_beside(first + 22 * GIB).room_for_kv(0.45)
    assert first == second
    assert 40 * GIB <= first <= 41 * GIB


@pytest.mark.parametrize("other", [30 * GIB, 90 * GIB])
def test_other_processes_limit_the_cache_to_what_they_leave(other: int) -> None:
    room = use_beside(other).room_for_kv(0.9)
    needed = 4 * GIB + GIB  # for the step and the graphs
    assert use_beside(other).free - needed - RESERVE <= room < use_beside(other).free - needed


def test_no_room_is_zero_not_negative() -> None:
    assert use_beside(122 * GIB).room_for_kv(0.9) == 0
    assert use_beside(0).room_for_kv(0.1) == 0
