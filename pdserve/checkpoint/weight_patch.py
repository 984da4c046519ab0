"""A patch: new values of some weights in a safetensors file, by the checkpoint's names, in the checkpoint's dtypes.

    model.norm.weight.indices    [n] I64 or I32: places in the flattened tensor, ascending
    model.norm.weight.values     [n] the values there
    lm_head.weight.rows.128      [k, …] rows 128 … 128 + k - 1

A tensor has either indices and values, or rows. The metadata of the file may give the XXH3 digest (128 bits, hex) of
the bytes of each entry, under the entry's name. Trainers that send sparse updates to vLLM write such files, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pdserve.checkpoint.safetensors_header import Tensor, read_header_and_metadata
from pdserve.errors import CheckpointError, shown

_ENTRY = re.compile(r"(.+)\.(?:(indices|values)|rows\.(\d{1,18}))", re.DOTALL)
_INDEX_DTYPES = ("I64", "I32")


class PatchEntry(NamedTuple):
    """New values of one tensor. Keys are names in the file."""

    name: str  # tensor name in the checkpoint
    values: str  # key
    indices: str = ""  # key; "": the values are rows
    first_row: int = 0


class WeightPatch(NamedTuple):
    """The content of a patch; no value has been read."""

    path: Path
    entries: tuple[PatchEntry, ...]
    tensors: Mapping[str, Tensor]  # by key
    digests: Mapping[str, str]  # by key; may lack some


def read_patch(path: Path) -> WeightPatch:
    """Read the header of a patch. Raises CheckpointError if it is damaged or contradicts itself."""
    tensors, metadata = read_header_and_metadata(path)
    try:
        entries = _entries(tensors)
        if not entries:
            raise _Refused("has no entries")
        _check_overlaps(entries, tensors)
    except _Refused as exc:
        raise CheckpointError(f"{path} {exc}; write the patch again") from exc
    return WeightPatch(path, entries, tensors, {key: metadata[key] for key in tensors if key in metadata})


class _Refused(Exception):
    """An entry contradicts the format."""


def _entries(tensors: Mapping[str, Tensor]) -> tuple[PatchEntry, ...]:
    entries: list[PatchEntry] = []
    for key, tensor in tensors.items():
        match = _ENTRY.fullmatch(key)
        if match is None:
            raise _Refused(f"has an entry {shown(key)}; names end in .indices, .values or .rows.NUMBER")
        name, kind, first_row = match.groups()
        if kind is None:
            if not tensor.shape:
                raise _Refused(f"has no rows in {shown(key)}, which is a single number")
            entries.append(PatchEntry(name, key, first_row=int(first_row)))
            continue
        other = f"{name}.{'indices' if kind == 'values' else 'values'}"
        if other not in tensors:
            raise _Refused(f"has an entry {shown(key)} but no {shown(other)}")
        if kind == "values":
            _check_pair(other, tensors[other], key, tensor)
            entries.append(PatchEntry(name, key, other))
    return tuple(entries)


def _check_pair(indices_key: str, indices: Tensor, values_key: str, values: Tensor) -> None:
    if indices.dtype not in _INDEX_DTYPES:
        raise _Refused(f"has {shown(indices_key)} of {indices.dtype}; indices are {' or '.join(_INDEX_DTYPES)}")
    if len(indices.shape) != 1 or indices.shape != values.shape:
        raise _Refused(
            f"has {shown(indices_key)} of shape {shown(indices.shape)} and {shown(values_key)} of shape "
            f"{shown(values.shape)}; both have one dimension and as many numbers"
        )


def _check_overlaps(entries: tuple[PatchEntry, ...], tensors: Mapping[str, Tensor]) -> None:
    """Raise _Refused if two entries may write the same value."""
    ends: dict[str, int] = {}  # tensor → row behind the last written one
    for entry in sorted(entries, key=lambda item: (item.name, item.first_row)):
        if entry.name in ends and (entry.indices or entry.first_row < ends[entry.name]):
            raise _Refused(f"has entries for {shown(entry.name)} that overlap, at {shown(entry.values)}")
        ends[entry.name] = 1 << 62 if entry.indices else entry.first_row + tensors[entry.values].shape[0]
