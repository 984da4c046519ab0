"""Whether a checkpoint that calls its head tied stores another head all the same, as transformers finds out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from pdserve.checkpoint.files import open_regular
from pdserve.checkpoint.safetensors_header import Tensor
from pdserve.checkpoint.weight_files import read_headers
from pdserve.errors import CheckpointError

_EMBEDDINGS = ("model.embed_tokens.weight", "model.embeddings.weight", "backbone.embeddings.weight")  # names in use
_HEAD = "lm_head."  # prefix of the weight, and of the parts of a quantized one
_CHUNK = 4 << 20  # bytes


class _Stored(NamedTuple):
    path: Path
    tensor: Tensor


def has_other_head(model_dir: Path) -> bool:
    """Return whether a head is stored that differs from the embedding. Raises CheckpointError.

    Both are read, unless dtype or shape tell, up to the first difference.
    """
    stored = {
        name: _Stored(path, tensor)
        for path, tensors in read_headers(model_dir).items()
        for name, tensor in tensors.items()
        if name in _EMBEDDINGS or name.startswith(_HEAD)
    }
    embeddings = [stored.pop(name) for name in _EMBEDDINGS if name in stored]
    return bool(embeddings) and any(not _equal(embeddings[0], head) for head in stored.values())


def _equal(one: _Stored, other: _Stored) -> bool:
    if (one.tensor.dtype, one.tensor.shape) != (other.tensor.dtype, other.tensor.shape):
        return False
    size = one.tensor.end - one.tensor.begin
    with open_regular(one.path) as (fd, _), open_regular(other.path) as (other_fd, _):
        for at in range(0, size, _CHUNK):
            count = min(_CHUNK, size - at)
            data = os.pread(fd, count, one.tensor.begin + at)
            if len(data) < count:
                raise CheckpointError(f"{one.path} was truncated while it was read; download it again")
            if data != os.pread(other_fd, count, other.tensor.begin + at):
                return False
    return True
