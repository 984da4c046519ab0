"""API keys: how one is made, and what is kept of it.

Only hashes are stored. A key is 256 random bits, so that a plain SHA-256 of it cannot be searched; passwords would need
a slow hash.
"""

from __future__ import annotations

import hashlib
import re
import secrets

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # fit for logs, labels and TOML


def new_key() -> str:
    return "sk-" + secrets.token_urlsafe(32)


def key_digest(key: bytes) -> bytes:
    """32 bytes."""
    return hashlib.sha256(key).digest()


def key_entry(name: str, key: str) -> str:
    """What the file of ``--api-keys`` says of a key."""
    return f'[keys."{name}"]\nsha256 = "{key_digest(key.encode()).hex()}"\n'
