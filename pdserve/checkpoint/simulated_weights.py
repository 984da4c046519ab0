"""The digest that replaces weights on a simulated node. Its tokens depend on it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from pdserve.checkpoint.file_states import check_unchanged, open_settled
from pdserve.checkpoint.files import read_file
from pdserve.checkpoint.safetensors_header import header_of
from pdserve.checkpoint.weight_files import weight_files
from pdserve.weights.change import FileStates

_MAX_CONFIG = 1 << 20  # bytes
_END = 1 << 16  # bytes


class SimulatedDigest(NamedTuple):
    digest: bytes
    files: FileStates  # states of the digested files


def simulated_digest(model_dir: Path) -> SimulatedDigest:
    """Return the digest of config.json and of the header and both ends of each weight file; there may be none.

    Raises CheckpointError.
    """
    config = model_dir / "config.json"
    with open_settled(config) as (_, state):
        digest = hashlib.blake2b(read_file(config, _MAX_CONFIG), digest_size=16)
        check_unchanged(config, state)
    files = {config.name: state}
    for path in weight_files(model_dir) if any(model_dir.glob("*.safetensors")) else ():
        with open_settled(path) as (fd, state):
            data = min((tensor.begin for tensor in header_of(path, fd).values()), default=state.size)
            digest.update(os.pread(fd, data + _END, 0) + os.pread(fd, _END, max(data, state.size - _END)))
            check_unchanged(path, state)
        files[path.name] = state
    return SimulatedDigest(digest.digest(), files)
