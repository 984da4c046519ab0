"""The digest that replaces weights on a simulated node. Its tokens depend on it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pdserve.checkpoint.files import open_regular, read_file
from pdserve.checkpoint.safetensors_header import read_header
from pdserve.checkpoint.weight_files import weight_files

_MAX_CONFIG, _END = 1 << 20, 1 << 16  # bytes


def simulated_digest(model_dir: Path) -> bytes:
    """Return the digest of config.json and of the header and both ends of each weight file; there may be none.

    Raises CheckpointError.
    """
    digest = hashlib.blake2b(read_file(model_dir / "config.json", _MAX_CONFIG), digest_size=16)
    for path in weight_files(model_dir) if any(model_dir.glob("*.safetensors")) else ():
        tensors = read_header(path)
        with open_regular(path) as (fd, status):
            data = min((tensor.begin for tensor in tensors.values()), default=status.st_size)
            digest.update(os.pread(fd, data + _END, 0) + os.pread(fd, _END, max(data, status.st_size - _END)))
    return digest.digest()
