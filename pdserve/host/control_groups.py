"""The control groups (containers) of this process, of version 2 and 1: folders with limits of CPUs and memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def own_folders(controller: str, root: Path = ROOT, own_groups: Path = OWN_GROUPS) -> Iterator[tuple[int, Path]]:
    """Yield version and folder of each group that limits this process, from its own group up to the root."""
    text = ""
    with suppress(OSError):
        text = own_groups.read_text()
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            yield from ((2, folder) for folder in _folders(root, path))
        elif controller in controllers.split(","):
            yield from ((1, folder) for folder in _folders(root / controller, path))


def _folders(root: Path, path: str) -> Iterator[Path]:
    """Yield the folders from a group up to the root. In a container, the path may be one of the host: then the root."""
    group = root / path.lstrip("/")
    while group != root and root in group.parents:
        yield group
        group = group.parent
    yield root
