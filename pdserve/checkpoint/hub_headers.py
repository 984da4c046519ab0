"""The headers of a checkpoint on the Hugging Face hub, without its weights: kilobytes, not gigabytes. Torch-free.

A folder gets config and tokenizer as downloaded. Each weight file is a sparse one of the published size: its header is
read with a ranged request, and of its tensors only the scales of an FP8 KV cache; all other bytes are holes.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pdserve.checkpoint.hub import hub_errors, is_hub_id, resolve_model
from pdserve.checkpoint.kv_scales import is_kv_scale
from pdserve.checkpoint.safetensors_header import LENGTH, MAX_HEADER, read_header
from pdserve.checkpoint.weight_files import MAX_FILES, weight_files
from pdserve.errors import CheckpointError, shown

_FIRST_BYTES = 256 << 10  # requested first; most headers are shorter
_AT_ONCE = 8  # requests
_SCALE_BYTES = 8  # at most, of a scale

Read = Callable[[int, int], bytes]
"""Returns the bytes ``begin`` … ``end`` - 1 of a file, fewer at its end."""


def resolve_headers(model: str, weights: bool = True) -> Path:
    """Return a directory whose config, tokenizer and headers are those of a model, like ``resolve_model``.

    It is the model's own directory, or the cached one, if its weights are on this machine. Else it lasts until this
    process ends. Raises CheckpointError.
    """
    if not weights or not is_hub_id(model):
        return resolve_model(model, weights)
    try:
        directory = resolve_model(model, cached=True)
        weight_files(directory)
        return directory
    except CheckpointError:  # not cached, or not with its weights
        return _copy_headers(model, resolve_model(model, weights=False))


def _copy_headers(model: str, plain: Path) -> Path:
    from huggingface_hub import HfFileSystem  # on demand, as in hub.py

    directory = Path(tempfile.mkdtemp(prefix="pdserve-headers-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for file in plain.iterdir():
        if file.is_file():
            (directory / file.name).symlink_to(file.resolve())
    with hub_errors(model):
        files = HfFileSystem()
        listed = [file for file in files.ls(model) if isinstance(file, dict)]
        sizes = {str(file["name"]): int(file["size"]) for file in listed if file["name"].endswith(".safetensors")}
        if len(sizes) > MAX_FILES:
            raise CheckpointError(
                f"model {shown(model)} has {len(sizes)} weight files, the limit is {MAX_FILES}; choose another one"
            )

        def copy(name: str) -> None:
            path = directory / name.rpartition("/")[2]
            # A cache would read megabytes ahead.
            write_sparse(path, sizes[name], lambda begin, end: files.cat_file(name, begin, end, cache_type="none"))

        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(copy, sizes))
    return directory


def write_sparse(path: Path, size: int, read: Read) -> None:
    """Write a weight file of ``size`` bytes with its header and KV scales. Raises CheckpointError."""
    head = read(0, min(size, _FIRST_BYTES))
    if len(head) >= LENGTH.size:
        end = min(size, LENGTH.size + min(LENGTH.unpack_from(head)[0], MAX_HEADER))
        head = head[:end] + (read(len(head), end) if end > len(head) else b"")
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)
    scales = [tensor for name, tensor in read_header(path).items() if is_kv_scale(name)]
    with path.open("r+b") as file:
        for scale in scales:
            if scale.end - scale.begin <= _SCALE_BYTES:  # others are refused by who reads them
                file.seek(scale.begin)
                file.write(read(scale.begin, scale.end))
