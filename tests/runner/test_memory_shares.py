"""Shares of GPU memory: what a node gets beside other processes on the same GPU."""

from __future__ import annotations

import msgspec
import pytest
import torch
from checkpoints import node_config

from pdserve.config.hub import EMBEDDED_MODEL
from pdserve.config.node_config import NodeConfig
from pdserve.kv import KVLayout
from runner.distributed.parallel_state import ParallelState
from runner.loading.memory import MemoryMeter, MemoryUse, layout_that_fits

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


def test_two_nodes_measure_only_their_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda is replaced by a GPU of 40 GiB, on which nodes load one after the other."""
    config = msgspec.structs.replace(node_config(EMBEDDED_MODEL), measure_kv_memory=True, gpu_memory_utilization=0.45)
    used = {"elsewhere": 0, "here": 0, "libraries": 0, "peak": 0}

    def free_and_total(device: torch.device) -> tuple[int, int]:
        return 40 * GIB - used["elsewhere"] - used["here"] - used["libraries"], 40 * GIB

    def try_out(config: NodeConfig, layout: KVLayout) -> int:
        used["peak"] = used["here"] + 2 * GIB + layout.total_bytes
        used["libraries"] += GIB // 2
        return -GIB  # another process freed memory meanwhile

    monkeypatch.setattr(torch.cuda, "mem_get_info", free_and_total)
    for name, value in (("reserved", "here"), ("allocated", "here")):
        monkeypatch.setattr(torch.cuda, f"memory_{name}", lambda device, value=value: used[value])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: used["peak"])
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    parallel = ParallelState(config.position, config.device, "")
    blocks = []
    for _ in range(2):
        used.update(here=0, libraries=GIB // 2)
        meter = MemoryMeter(parallel.device)
        used["here"] += 4 * GIB
        layout = layout_that_fits(config, parallel, meter, try_out)
        blocks.append(layout.num_blocks)
        used["elsewhere"] += used["here"] + used["libraries"] + layout.total_bytes
    assert blocks[0] == blocks[1]
    assert used["elsewhere"] <= 40 * GIB
