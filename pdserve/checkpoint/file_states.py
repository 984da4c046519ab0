"""States of a checkpoint's files, which tell whether two programs have read the same bytes.

    digests (frontend)        read in state A ──announced──┐
    weights (each rank)       read in state A or B ────────┴── B: refused, or the node does not start

Equal states mean equal bytes if the digests were taken later than a tick after the last change.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.checkpoint.files import open_regular
from pdserve.errors import CheckpointError, shown
from pdserve.weights.change import FileState, FileStates

_TICK = 0.02  # seconds; two changes within a tick of the file system's clock leave the same times


def state_of(status: os.stat_result) -> FileState:
    return FileState(status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


def is_settled(state: FileState) -> bool:
    """Return whether a further change would leave another state."""
    return time.time_ns() - state.ctime_ns > _TICK * 1e9


@contextmanager
def open_settled(path: Path) -> Iterator[tuple[int, FileState]]:
    """Open a regular file, a tick after its last change, and yield its descriptor and state. Raises CheckpointError."""
    with open_regular(path) as (fd, status):
        if not is_settled(state_of(status)):
            time.sleep(_TICK)  # at most once: the clock of a file server may be ahead
            status = os.fstat(fd)
        yield fd, state_of(status)


def check_unchanged(path: Path, state: FileState) -> None:
    """Raise CheckpointError if the file is not the one that was opened, or was written to since. Raises OSError."""
    if state_of(os.stat(path)) != state:
        raise CheckpointError(f"{path} changed while it was read; try again when it is complete")


def check_same_files(model_dir: str | Path, current: FileStates, digested: FileStates) -> None:
    """Raise CheckpointError unless the files to load, or loaded, are those whose digests were taken."""
    changed = sorted(name for name in current.keys() | digested.keys() if current.get(name) != digested.get(name))
    if changed:
        raise CheckpointError(
            f"{shown(changed[0])} in {model_dir} changed between the digests of its weights and their load; "
            "try again when the checkpoint is complete"
        )
