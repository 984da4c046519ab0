"""Keeps the digests of a checkpoint's tensors from one start of a node to the next.

The cache is ``.pdserve-digests.json`` beside the model, else a file in the user's cache directory. The digests of a
weight file count only while its size, times and inode are those of the file that was digested. A cache that is
truncated or changed is ignored: its first line is the SHA-256 of the rest. Hosts that share it add their parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from pathlib import Path

import msgspec

from pdserve.checkpoint.file_states import is_settled
from pdserve.checkpoint.files import DECODE_ERRORS, read_file
from pdserve.errors import CheckpointError
from pdserve.weights.change import FileState

_log = logging.getLogger(__name__)

NAME = ".pdserve-digests.json"
_VERSION = 3  # version 2 had the digests of all tensors of a file, or of none
_READABLE = (2, _VERSION)
_MAX_BYTES = 64 << 20

TensorDigests = dict[str, str]  # hex digits by tensor


class _Entry(msgspec.Struct):
    state: FileState
    tensors: TensorDigests


class _Content(msgspec.Struct):
    version: int
    files: dict[str, _Entry]  # by file name in the model directory


class DigestCache:
    """The cached digests of one model directory."""

    def __init__(self, model_dir: Path) -> None:
        self._paths = [model_dir / NAME, *_user_cache(model_dir)]
        self._stored = [_read(path) for path in self._paths]
        self._files: dict[str, _Entry] = {}  # entries of the present files
        self._changed = False

    def get(self, name: str, state: FileState) -> TensorDigests:
        """Return the digests of a file's tensors that are known and were taken in this state of the file."""
        digests: TensorDigests = {}
        for files in self._stored:
            if name in files and files[name].state == state:
                digests |= files[name].tensors
        self._files[name] = _Entry(state, digests)
        return dict(digests)

    def put(self, name: str, state: FileState, tensors: TensorDigests) -> None:
        """Keep digests, unless the file has changed so recently that a further change could leave the same state."""
        if is_settled(state):
            self._files[name] = _Entry(state, tensors)
            self._changed = True

    def save(self) -> None:
        """Write new digests to the first place that is writable; without one, they are computed at each start."""
        if not self._changed:
            return
        for path in self._paths:
            payload = msgspec.json.encode(_Content(_VERSION, _merged(self._files, _read(path))))
            try:
                _write(path, hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)
                return
            except OSError as exc:
                reason = exc.strerror
        _log.info("weight digests cannot be cached (%s): the next start computes them again", reason)


def _merged(files: dict[str, _Entry], stored: dict[str, _Entry]) -> dict[str, _Entry]:
    """Return the files' entries with the tensors that another host has stored meanwhile."""
    return {
        name: _Entry(entry.state, stored[name].tensors | entry.tensors)
        if name in stored and stored[name].state == entry.state
        else entry
        for name, entry in files.items()
    }


def _user_cache(model_dir: Path) -> list[Path]:
    """Return the cache file in the user's cache directory; none without a home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        return []
    name = hashlib.sha256(os.fsencode(os.path.realpath(model_dir))).hexdigest()[:32]
    return [Path(base, "pdserve", f"digests-{name}.json")]


def _read(path: Path) -> dict[str, _Entry]:
    """Return the entries of a cache file; none if it is missing or damaged."""
    if not os.path.exists(path):
        return {}
    try:
        digest, _, payload = read_file(path, _MAX_BYTES).partition(b"\n")
        if digest != hashlib.sha256(payload).hexdigest().encode():
            raise CheckpointError(f"{path} is damaged; it is ignored")
        content = msgspec.json.decode(payload, type=_Content)
    except (CheckpointError, *DECODE_ERRORS) as exc:
        _log.warning("weight digests are computed again: %s", exc)
        return {}
    return content.files if content.version in _READABLE else {}


def _write(path: Path, data: bytes) -> None:
    """Replace a file atomically."""
    if path.name != NAME:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(prefix=f"{NAME}.", dir=path.parent)
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o644)
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
