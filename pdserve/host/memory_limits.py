"""Memory of the host that this process may use, within the limits of its control groups (containers)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pdserve.host.control_groups import OWN_GROUPS, ROOT, own_folders

_MEMINFO = Path("/proc/meminfo")
#: Names of limit, use and page cache that can be reclaimed, by version of control groups.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def usable_memory(root: Path = ROOT, own_groups: Path = OWN_GROUPS, meminfo: Path = _MEMINFO) -> int | None:
    """Return the bytes that this process may use if no other does; None if unknown."""
    limits = (limit for limit, _ in _groups(root, own_groups))
    return min([*_of_host("MemTotal", meminfo), *limits], default=None)


def free_memory(root: Path = ROOT, own_groups: Path = OWN_GROUPS, meminfo: Path = _MEMINFO) -> int | None:
    """Return the bytes that this process can still allocate; None if unknown."""
    rests = (max(0, limit - used) for limit, used in _groups(root, own_groups))
    return min([*_of_host("MemAvailable", meminfo), *rests], default=None)


def _of_host(name: str, meminfo: Path) -> Iterator[int]:
    with suppress(OSError):
        for line in meminfo.read_text().splitlines():
            if line.startswith(f"{name}:"):
                yield int(line.split()[1]) * 1024


def _groups(root: Path, own_groups: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of each control group with a limit, in bytes. Reclaimable page cache counts as unused."""
    for version, folder in own_folders("memory", root, own_groups):
        limit, used, cache = _FILES[version]
        with suppress(OSError, ValueError):
            most = int((folder / limit).read_text())  # "max" is no number: no limit
            stat = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines())
            yield most, int((folder / used).read_text()) - int(stat.get(cache, 0))
