"""A change of a running node's weights. Plain values, no torch."""

from __future__ import annotations

import msgspec

WAIT = "wait"
ABORT = "abort"
WHEN = (WAIT, ABORT)  # running requests end first, or end now with an error that clients retry


class FileState(msgspec.Struct, frozen=True):
    """Values that change with a file's content. Programs can set back the modification time, not the change time."""

    size: int  # bytes
    inode: int
    mtime_ns: int
    ctime_ns: int


FileStates = dict[str, FileState]  # state of a checkpoint's files, by name in its directory


class HostDigests(msgspec.Struct, frozen=True):
    """Digests of the tensor groups that the ranks of a host load, and the files from which they were taken."""

    first_rank: int
    groups: dict[str, str] = {}
    files: FileStates = {}
    draft: str = ""  # digest of the head that makes drafts


class WeightChange(msgspec.Struct, frozen=True):
    """A checkpoint or a patch that replaces weights in memory. One path is set, on the host of each rank."""

    model_dir: str = ""  # another checkpoint of the same architecture and shape
    weights_hash: str = ""  # each rank's checkpoint must have it (pdserve/config/compatibility.py); empty: not compared
    weight_files: FileStates = {}  # files on rank 0's host whose digests will be announced; {}: not compared
    patch: str = ""  # file with new values of some tensors (pdserve/checkpoint/weight_patch.py)
