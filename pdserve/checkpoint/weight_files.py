"""The safetensors files of a checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from pdserve.checkpoint.files import DECODE_ERRORS, read_file
from pdserve.checkpoint.gguf import conversion
from pdserve.checkpoint.safetensors_header import MAX_TENSORS, Tensor, read_header
from pdserve.errors import CheckpointError, cut, shown

_INDEX = "model.safetensors.index.json"
_MAX_INDEX = 64 << 20  # bytes; 100,000 tensors take 10 MB
MAX_FILES = 4096
_FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # dtypes of computation
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.ckpt")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]  # tensor → file


def weight_files(model_dir: Path) -> list[Path]:
    """Return the files in the checkpoint's index, or else all ``*.safetensors``. Raises CheckpointError."""
    try:
        return _weight_files(model_dir)
    except OSError as exc:
        raise CheckpointError(f"{cut(str(model_dir))} cannot be read ({exc.strerror}); name another directory") from exc


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / _INDEX
    if not index.exists():
        files = sorted(model_dir.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{model_dir} has no *.safetensors; {_without_weights(model_dir)}")
        return _bounded(model_dir, files)
    try:
        names = sorted(set(msgspec.json.decode(read_file(index, _MAX_INDEX), type=_Index).weight_map.values()))
    except DECODE_ERRORS as exc:
        raise CheckpointError(f"{index} cannot be read ({exc}); download the checkpoint again") from exc
    for name in names:
        if "/" in name or "\0" in name or name in ("", ".", ".."):
            raise CheckpointError(f"{index} names {shown(name)}, which is not a file beside it; correct the index")
        if not (model_dir / name).is_file():
            raise CheckpointError(f"{index} names {shown(name)}, which is missing; download the checkpoint again")
    return _bounded(model_dir, [model_dir / name for name in names])


def read_headers(model_dir: Path) -> dict[Path, dict[str, Tensor]]:
    """Return the tensors of each file of a checkpoint. Raises CheckpointError."""
    return collect_headers(model_dir, ((path, read_header(path)) for path in weight_files(model_dir)))


def collect_headers(
    model_dir: Path, headers: Iterable[tuple[Path, dict[str, Tensor]]]
) -> dict[Path, dict[str, Tensor]]:
    """Return the tensors of each file. Raises CheckpointError if there are too many, or one of them twice."""
    collected: dict[Path, dict[str, Tensor]] = {}
    names: set[str] = set()
    for path, tensors in headers:
        collected[path] = tensors
        if twice := names & tensors.keys():
            raise CheckpointError(
                f"{path}: tensor {shown(min(twice))} is in the checkpoint twice; remove the second file"
            )
        names |= tensors.keys()
        if len(names) > MAX_TENSORS:
            raise CheckpointError(f"{model_dir} has more than {MAX_TENSORS} tensors; choose another checkpoint")
    return collected


def most_stored_dtype(headers: Mapping[Path, Mapping[str, Tensor]]) -> str | None:
    """Return the dtype of most values that are stored in float32, bfloat16 or float16; None if there are none.

    Quantized weights count by the tensors beside them: embeddings, norms and scales.
    """
    values: Counter[str] = Counter()
    for tensors in headers.values():
        for tensor in tensors.values():
            if tensor.dtype in _FLOATS:
                values[_FLOATS[tensor.dtype]] += math.prod(tensor.shape)
    return max(values, key=values.__getitem__, default=None)


def _without_weights(model_dir: Path) -> str:
    """Return the remedy for a checkpoint without safetensors."""
    others = sorted(path.name for pattern in _OTHER_WEIGHTS for path in model_dir.glob(pattern))
    if others and others[0].endswith(".gguf"):
        return conversion(model_dir / others[0])
    if others:
        return f"convert {shown(others[0])} to safetensors"
    return "download the weights, or give --load-format dummy for random ones"


def _bounded(model_dir: Path, files: list[Path]) -> list[Path]:
    if len(files) > MAX_FILES:
        raise CheckpointError(f"{model_dir} has {len(files)} weight files, the limit is {MAX_FILES}; merge some")
    return files
