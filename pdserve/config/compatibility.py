"""Nodes may exchange KV if their protocol versions and their compatibility hashes are equal.

The version of pdserve itself does not matter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from pdserve.errors import cut

_MAX_NAMED = 10  # fields in an error

WEIGHTS_OF = "weights of "  # before the name of a tensor group, in the fields
PROTOCOL_VERSION = 8  # the version of proto/pdserve.proto; its rules are at the file's top


def describe_protocol(theirs: int) -> str:
    """Return the error for a node that speaks another version."""
    return f"protocol {theirs} is not {PROTOCOL_VERSION}; run one release of pdserve on all nodes and routers"


def compat_hash(fields: Mapping[str, str]) -> str:
    """Return the hex SHA-256 of the sorted fields. Equal hashes: nodes can exchange KV."""
    return hashlib.sha256(json.dumps(sorted(fields.items())).encode()).hexdigest()


def weights_hash(fields: Mapping[str, str]) -> str:
    """Return a hash over the weights alone: equal for nodes that can load each other's tensors."""
    groups = {name: value for name, value in fields.items() if name.startswith(WEIGHTS_OF) or name == "weights"}
    return hashlib.sha256(json.dumps(sorted(groups.items())).encode()).hexdigest()


def weights_version(fields: Mapping[str, str]) -> str:
    """Return a short name of the weights: equal for all nodes with equal weights."""
    return weights_hash(fields)[:12]


def differences(mine: Mapping[str, str], theirs: Mapping[str, str], here: str = "here", there: str = "there") -> str:
    """Describe differing fields with both values: ``block_size: 16 here, 32 there; …``; empty if none differ.

    Names the first ten; a layer has several fields of weights.
    """
    names = [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
    fields = [
        f"{cut(name)}: {cut(mine.get(name, 'nothing'))} {here}, {cut(theirs.get(name, 'nothing'))} {there}"
        for name in names[:_MAX_NAMED]
    ]
    return "; ".join(fields + [f"and {len(names) - _MAX_NAMED} more"] * (len(names) > _MAX_NAMED))
