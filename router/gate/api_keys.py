"""API keys and their hashes.

Only hashes are stored. A key has 256 random bits, so a plain SHA-256 suffices; passwords would need a slow hash.
"""

from __future__ import annotations

import hashlib
import re
import secrets

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # valid in logs, metrics labels and TOML


def new_key() -> str:
    return "sk-" + secrets.token_urlsafe(32)


def key_digest(key: bytes) -> bytes:
    """32 bytes."""
    return hashlib.sha256(key).digest()


def key_entry(name: str, key: str) -> str:
    """The entry of a key in the file of ``--api-keys``."""
    return f'[keys."{name}"]\nsha256 = "{key_digest(key.encode()).hex()}"\n'
