"""Compatibility hash: two nodes may exchange KV if everything that must be equal on both sides is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from pdserve.errors import cut

_MAX_NAMED = 10  # fields in an error

WEIGHTS_OF = "weights of "  # before the name of a tensor group, in the fields
PROTOCOL_VERSION = 5  # of proto/pdserve.proto between nodes; raise it when a node could misread an older one


def compat_hash(fields: Mapping[str, str], protocol: int = PROTOCOL_VERSION) -> str:
    """Return the hex SHA-256 of the protocol version and the sorted fields. Equal hashes: nodes can exchange KV."""
    text = json.dumps([protocol, sorted(fields.items())])
    return hashlib.sha256(text.encode()).hexdigest()


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
    found = [
        f"{cut(name)}: {cut(mine.get(name, 'nothing'))} {here}, {cut(theirs.get(name, 'nothing'))} {there}"
        for name in names[:_MAX_NAMED]
    ]
    return "; ".join(found + [f"and {len(names) - _MAX_NAMED} more"] * (len(names) > _MAX_NAMED))
