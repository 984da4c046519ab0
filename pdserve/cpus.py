"""How many CPUs this process may use: cores it may run on, and the limit of its control groups (containers)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def usable_cpus(root: Path = _ROOT, own_groups: Path = _OWN_GROUPS) -> int:
    """Return the CPUs, rounded up and at least 1: 2 for ``limits: {cpu: 2}`` in Kubernetes, on any machine."""
    cores = len(os.sched_getaffinity(0))
    limits = [limit for limit in _limits(root, own_groups) if limit > 0.0]
    return max(1, min([cores, *map(math.ceil, limits)]))


def _limits(root: Path, own_groups: Path) -> Iterator[float]:
    """Yield the CPU limit of each control group of this process, of version 2 and 1, in CPUs."""
    text = ""
    with suppress(OSError):
        text = own_groups.read_text()
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            yield from _limits_of_v2(root, path)
        elif "cpu" in controllers.split(","):
            yield from _limits_of_v1(root / "cpu", path)


def _limits_of_v2(root: Path, path: str) -> Iterator[float]:
    for folder in _folders(root, path):
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            yield float(quota) / float(period)  # "max" is no number: no limit


def _limits_of_v1(root: Path, path: str) -> Iterator[float]:
    for folder in _folders(root, path):
        with suppress(OSError, ValueError):
            quota = float((folder / "cpu.cfs_quota_us").read_text())  # -1: no limit
            yield quota / float((folder / "cpu.cfs_period_us").read_text())


def _folders(root: Path, path: str) -> Iterator[Path]:
    """Yield the folders from a group up to the root. In a container, the path may be one of the host: then the root."""
    group = root / path.lstrip("/")
    while group != root and root in group.parents:
        yield group
        group = group.parent
    yield root
