"""Shares of GPU memory: what a node gets beside other processes on the same GPU."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from checkpoints import make_checkpoint, node_config

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.node_config import NodeConfig
from pdserve.kv.layout import KVLayout
from pdserve.kv.states import StateLayout
from runner.distributed.parallel_state import ParallelState
from runner.memory import process_memory
from runner.memory.kv_memory import MemoryUse, layouts_that_fit

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


Layouts = tuple[KVLayout, StateLayout | None]


def bytes_of(layouts: Layouts) -> int:
    layout, states = layouts
    return layout.total_bytes + (0 if states is None else states.total_bytes)


class Card:
    """A GPU of 40 GiB that processes share, in place of torch.cuda and NVML."""

    total = 40 * GIB

    def __init__(self, monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
        self.elsewhere = 0  # bytes that other processes hold
        self.reserved = 0  # bytes that PyTorch's allocator holds in this process
        self.libraries = 0  # bytes that this process holds outside of the allocator
        self.peak = 0  # largest number of bytes that the allocator has held
        for name, value in {
            "mem_get_info": lambda device: (
                self.total - self.elsewhere - self.reserved - self.libraries,
                self.total,
            ),
            "memory_reserved": lambda device: self.reserved,
            "memory_allocated": lambda device: self.reserved,
            "max_memory_allocated": lambda device: self.peak,
            "empty_cache": lambda *args: None,
            "reset_peak_memory_stats": lambda *args: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        driver = (lambda device: self.reserved + self.libraries) if told else (lambda device: None)
        monkeypatch.setattr(process_memory, "_known_to_driver", driver)

    def start_node(self, share: float, meanwhile: int, model_dir: Path = EMBEDDED_MODEL) -> Layouts:
        """Return the layouts of a node, beside which other processes take ``meanwhile`` bytes, or free them."""
        self.reserved = 4 * GIB  # weights
        self.libraries = GIB // 2
        config = node_config(model_dir, gpu_memory_utilization=share)
        config = msgspec.structs.replace(config, measure_kv_memory=True)

        def try_out(config: NodeConfig, layout: KVLayout, states: StateLayout | None) -> int:
            self.peak = self.reserved + 2 * GIB + bytes_of((layout, states))
            self.libraries += GIB // 2
            self.elsewhere += meanwhile
            return 0

        layouts = layouts_that_fit(config, ParallelState(config.position, config.device, ""), try_out)
        self.elsewhere += self.reserved + self.libraries + bytes_of(layouts)
        return layouts


@pytest.mark.parametrize("told", [True, False], ids=["NVML", "no NVML"])
@pytest.mark.parametrize("meanwhile", [12 * GIB, -12 * GIB, 0])
def test_kv_cache_does_not_depend_on_what_others_take_meanwhile(
    meanwhile: int, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Card(monkeypatch, told).start_node(0.45, 0)
    card = Card(monkeypatch, told)
    card.elsewhere = max(-meanwhile, 0)
    assert card.start_node(0.45, meanwhile) == alone


@pytest.mark.parametrize("told", [True, False], ids=["NVML", "no NVML"])
def test_two_nodes_of_half_a_gpu_fit(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, told)
    blocks = [card.start_node(0.5, 0)[0].num_blocks for _ in range(2)]
    assert 0.9 * blocks[0] <= blocks[1] <= blocks[0]
    assert card.elsewhere <= card.total


def test_kv_and_recurrent_states_divide_the_measured_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, _ = Card(monkeypatch, told=True).start_node(0.45, 0)
    model = make_checkpoint(tmp_path / "model", "qwen3_5_text", linear_key_head_dim=256, linear_value_head_dim=256)
    hybrid, states = Card(monkeypatch, told=True).start_node(0.45, 0, model)
    assert states is not None
    assert states.num_slots == 2 * 64 + 64  # node_config has 64 sequences
    assert abs(bytes_of((hybrid, states)) - layout.total_bytes) <= hybrid.block_bytes + layout.block_bytes
