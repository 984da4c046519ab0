"""Nodes may exchange KV if their protocol versions share a window and their compatibility hashes are equal.

The version of pdserve itself does not matter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from pdserve.errors import cut

_MAX_NAMED = 10  # fields in an error

WEIGHTS_OF = "weights of "  # before the name of a tensor group, in the fields
PROTOCOL_VERSION = 6  # the newest version of proto/pdserve.proto that this node speaks; its rules are at the file's top
UNDESCRIBED_PROTOCOL = 5  # the version of nodes that do not describe one; older ones are in no window
SPOKEN_PROTOCOLS = range(max(PROTOCOL_VERSION - 1, UNDESCRIBED_PROTOCOL), PROTOCOL_VERSION + 1)


def common_protocol(newest: int, other_newest: int = PROTOCOL_VERSION) -> int | None:
    """Return the version that two nodes speak with each other, from the newest version of each; 0: not described.

    It is the older of the two versions. None: the two are more than one version apart.
    """
    one = newest or UNDESCRIBED_PROTOCOL
    other = other_newest or UNDESCRIBED_PROTOCOL
    older = min(one, other)
    return older if max(one, other) - older <= 1 and older >= UNDESCRIBED_PROTOCOL else None


def describe_window(theirs: int) -> str:
    """Return the error for a node that speaks none of this node's versions."""
    spoken = " and ".join(map(str, SPOKEN_PROTOCOLS))
    return f"protocol {theirs} is none of {spoken}; upgrade by releases whose protocols are at most one version apart"


def compat_hash(fields: Mapping[str, str]) -> str:
    """Return the hex SHA-256 of the sorted fields. Equal hashes: nodes can exchange KV.

    Nodes of protocol 5 hash its version, too, so 5 stays part of every hash.
    """
    text = json.dumps([5, sorted(fields.items())])
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
    fields = [
        f"{cut(name)}: {cut(mine.get(name, 'nothing'))} {here}, {cut(theirs.get(name, 'nothing'))} {there}"
        for name in names[:_MAX_NAMED]
    ]
    return "; ".join(fields + [f"and {len(names) - _MAX_NAMED} more"] * (len(names) > _MAX_NAMED))
