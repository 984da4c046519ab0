"""Headers of safetensors files, checked completely: which bytes are which tensor's. No tensor is read.

    8 bytes: length of the header, little-endian │ header: JSON │ tensors, without gaps

https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import NamedTuple

import msgspec

from pdserve.checkpoint.files import DECODE_ERRORS, open_regular
from pdserve.errors import CheckpointError, shown

MAX_HEADER = 32 << 20  # bytes; 250,000 tensors have about 30 MB
MAX_TENSORS = 1 << 18  # tensors per file, and per checkpoint
_MAX_DIMENSIONS = 16
LENGTH = struct.Struct("<Q")  # the first bytes of a file: the length of its header
_AGAIN = "download it again"

_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


class Tensor(NamedTuple):
    """A tensor's place in its file: bytes ``begin`` … ``end`` - 1."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name, in the order of their bytes.

    Raises CheckpointError unless they are of known dtypes, fill the file, and do not overlap.
    """
    return read_header_and_metadata(path)[0]


def read_header_and_metadata(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors as ``read_header`` does, and the file's metadata."""
    with open_regular(path) as (fd, _):
        return _read(path, fd)


def header_of(path: Path, fd: int) -> dict[str, Tensor]:
    """Return the tensors of an open file as ``read_header`` does."""
    return _read(path, fd)[0]


def _read(path: Path, fd: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    size = os.fstat(fd).st_size
    prefix = os.pread(fd, LENGTH.size, 0)
    length = LENGTH.unpack(prefix)[0] if len(prefix) == LENGTH.size else size
    if length > size - len(prefix):
        raise CheckpointError(f"{path} is not a safetensors file or is truncated at {size} bytes; {_AGAIN}")
    if length > MAX_HEADER:
        raise CheckpointError(f"{path} has a header of {length} bytes, the limit is {MAX_HEADER}; {_AGAIN}")
    header = os.pread(fd, length, LENGTH.size)
    try:
        entries, metadata = _entries(path, header)
        return _placed(path, entries, LENGTH.size + length, size), metadata
    except DECODE_ERRORS as exc:
        raise CheckpointError(f"{path} has a broken safetensors header ({exc}); {_AGAIN}") from exc


def _entries(path: Path, header: bytes) -> tuple[list[tuple[str, _Entry]], dict[str, str]]:
    raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    metadata = raw.pop("__metadata__", None)
    if len(raw) > MAX_TENSORS:
        raise CheckpointError(f"{path} has {len(raw)} tensors, the limit is {MAX_TENSORS}; {_AGAIN}")
    decode = msgspec.json.Decoder(_Entry).decode
    entries = sorted(((name, decode(entry)) for name, entry in raw.items()), key=lambda item: item[1].data_offsets)
    return entries, {} if metadata is None else msgspec.json.decode(metadata, type=dict[str, str] | None) or {}


def _placed(path: Path, entries: list[tuple[str, _Entry]], start: int, size: int) -> dict[str, Tensor]:
    """Check the entries, in the order of their bytes, and turn offsets behind the header into places in the file."""
    tensors = {}
    at = start
    for name, entry in entries:
        begin = start + entry.data_offsets[0]
        end = start + entry.data_offsets[1]
        problem = _problem(entry)
        if not problem and begin != at:
            problem = f"begins at byte {shown(begin)}, the tensor before it ends at {at}"
        elif not problem and end > size:
            problem = f"ends at byte {shown(end)} of {size}: the file is truncated"
        if problem:
            raise CheckpointError(f"{path}: tensor {shown(name)} {problem}; {_AGAIN}")
        tensors[name] = Tensor(entry.dtype, entry.shape, begin, end)
        at = end
    if at != size:
        raise CheckpointError(f"{path} has {size - at} bytes behind its last tensor; {_AGAIN}")
    return tensors


def _problem(entry: _Entry) -> str:
    """Describe why an entry contradicts itself; empty if it does not."""
    bits = _BITS.get(entry.dtype)
    begin, end = entry.data_offsets
    if bits is None:
        return f"has dtype {shown(entry.dtype)}; known are {', '.join(_BITS)}"
    if len(entry.shape) > _MAX_DIMENSIONS or min(entry.shape, default=0) < 0:
        return f"has shape {shown(entry.shape)}; the limit is {_MAX_DIMENSIONS} dimensions of at least 0"
    if math.prod(entry.shape) * bits != (end - begin) * 8:
        return f"has {shown(end - begin)} bytes for shape {shown(entry.shape)} of {entry.dtype}"
    return ""
