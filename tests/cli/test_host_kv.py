"""Sizes of host memory for KV, and the memory that a host has."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolution.host_kv import host_room
from pdserve.config.resolve import resolve
from pdserve.errors import ConfigError
from pdserve.host.memory_limits import free_memory, usable_memory

CPU = DeviceInfo("cpu", 0, "CPU", 8 << 30)


def config_with(size: int, **options: object) -> NodeConfig:
    return resolve(NodeOptions(model=str(EMBEDDED_MODEL), host_kv_memory=size, **options), CPU)  # type: ignore[arg-type]


def test_ranks_divide_the_memory() -> None:
    whole = config_with(64 << 20)
    halves = config_with(64 << 20, tp=2)
    assert host_room(whole, whole.kv_layout, None) == host_room(halves, halves.kv_layout, None)
    assert host_room(whole, whole.kv_layout, None).num_blocks == (64 << 20) // whole.kv_layout.block_bytes


@pytest.mark.parametrize(("size", "text"), [(1 << 60, "less"), (10, "does not hold one block")])
def test_memory_that_is_not_there_or_holds_nothing_is_refused(size: int, text: str) -> None:
    with pytest.raises(ConfigError, match=f"host_kv_memory {size}.*{text}"):
        config_with(size)


@pytest.mark.parametrize("version", [1, 2])
def test_limit_of_a_container_counts(version: int, tmp_path: Path) -> None:
    """The container's group allows 3 GiB; 1 GiB is used, half of it as page cache. The group above allows 2 GiB."""
    root = tmp_path / "cgroup"
    meminfo = tmp_path / "meminfo"
    own = tmp_path / "own"
    meminfo.write_text("MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 7340032 kB\n")
    own.write_text("0::/pod/container\n" if version == 2 else "5:memory:/pod/container\n")
    group = root / "pod/container" if version == 2 else root / "memory/pod/container"
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for folder, limit, used in ((group, 3 << 30, 1 << 30), (group.parent, 2 << 30, 1 << 30)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {1 << 29}\ntotal_inactive_file {1 << 29}\n")
    assert usable_memory(root, own, meminfo) == 2 << 30
    assert free_memory(root, own, meminfo) == (2 << 30) - (1 << 29)


def test_without_a_limit_the_host_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1024 kB\nMemAvailable: 512 kB\n")
    assert usable_memory(tmp_path, tmp_path / "none", meminfo) == 1 << 20
    assert free_memory(tmp_path, tmp_path / "none", meminfo) == 1 << 19
    assert usable_memory(tmp_path, tmp_path / "none", tmp_path / "none") is None
