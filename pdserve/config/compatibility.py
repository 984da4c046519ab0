"""Compatibility hash: two nodes may exchange KV if everything that must be equal on both sides is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

PROTOCOL_VERSION = 4  # of proto/pdserve.proto between nodes; raise it when a node could misread an older one


def compat_hash(fields: Mapping[str, str], protocol: int = PROTOCOL_VERSION) -> str:
    """Return the hex SHA-256 of the protocol version and the sorted fields. Equal hashes: nodes can exchange KV."""
    text = json.dumps([protocol, sorted(fields.items())])
    return hashlib.sha256(text.encode()).hexdigest()


def differences(mine: Mapping[str, str], theirs: Mapping[str, str], here: str = "here", there: str = "there") -> str:
    """Describe differing fields with both values: ``block_size: 16 here, 32 there; …``; empty if none differ."""
    return "; ".join(
        f"{name}: {mine.get(name, 'nothing')} {here}, {theirs.get(name, 'nothing')} {there}"
        for name in sorted({*mine, *theirs})
        if mine.get(name) != theirs.get(name)
    )
