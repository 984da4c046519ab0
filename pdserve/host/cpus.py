"""How many CPUs this process may use: cores it may run on, and the limit of its control groups (containers)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pdserve.host.control_groups import OWN_GROUPS, ROOT, own_folders


def usable_cpus(root: Path = ROOT, own_groups: Path = OWN_GROUPS) -> int:
    """Return the CPUs, rounded up and at least 1: 2 for ``limits: {cpu: 2}`` in Kubernetes, on any machine."""
    cores = len(os.sched_getaffinity(0))
    limits = [limit for limit in _limits(root, own_groups) if limit > 0.0]
    return max(1, min([cores, *map(math.ceil, limits)]))


def _limits(root: Path, own_groups: Path) -> Iterator[float]:
    """Yield the CPU limit of each control group of this process, in CPUs."""
    for version, folder in own_folders("cpu", root, own_groups):
        with suppress(OSError, ValueError):
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()  # "max" is no number: no limit
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text()  # -1: no limit
                period = (folder / "cpu.cfs_period_us").read_text()
            yield float(quota) / float(period)
