"""CPUs that a process may use, by control groups of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.host.cpus import usable_cpus

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, CORES),
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "20000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "99900000 100000\n"}, CORES),
        ("0::/kubepods/pod/c\n", {"kubepods/pod/c/cpu.max": "max 100000", "kubepods/pod/cpu.max": "50000 100000"}, 1),
        ("0::/of/the/host\n", {"cpu.max": "100000 100000\n"}, 1),
        ("3:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ("3:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, CORES),
        ("3:cpuset:/\n", {"cpu/cpu.cfs_quota_us": "1", "cpu/cpu.cfs_period_us": "100000"}, CORES),
        ("0::/\n", {"cpu.max": "broken"}, CORES),
        ("", {}, CORES),
    ],
)
def test_limit_of_the_control_groups(tmp_path: Path, groups: str, files: dict[str, str], expected: int) -> None:
    root = tmp_path / "cgroup"
    own = tmp_path / "own"
    root.mkdir()
    own.write_text(groups)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert usable_cpus(root, own) == expected


def test_without_control_groups_all_cores_count(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path / "none", tmp_path / "none") == CORES
