"""The clients of a router and their API keys, as a file describes them.

[keys.alice]
sha256 = "…"                  # pdserve key alice; or a list of them, while a key is being replaced
requests_per_minute = 600     # all limits may be left out
tokens_per_minute = 100_000   # of prompts and outputs together
max_concurrent = 16           # requests at once
best_priority = 0             # lower ones in a request count as this
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Annotated

import msgspec

from pdserve.api_keys import NAME, key_digest
from pdserve.errors import ConfigError

MAX_KEYS = 10_000  # each is a label of metrics
Count = Annotated[int, msgspec.Meta(ge=1)]


class Client(msgspec.Struct, frozen=True):
    """Who asks. ``name`` stands in logs and metrics; None is no limit."""

    name: str = ""  # of anyone, where there are no keys
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    best_priority: int | None = None


ANONYMOUS = Client()


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: str | list[str]
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_concurrent: Count | None = None
    best_priority: int | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: dict[str, _Entry]


class KeyRing:
    """Clients by the SHA-256 of their keys.

    How long a look-up takes tells nothing of a stored hash: what is compared is a digest of what was presented, which
    nobody can steer, and a dict of Python finds bytes by a hash that is keyed anew in each process.
    """

    def __init__(self, clients: Mapping[bytes, Client]) -> None:
        self._clients = dict(clients)

    @property
    def clients(self) -> list[Client]:
        return list(self._clients.values())

    def client_of(self, key: bytes) -> Client | None:
        digest = key_digest(key)
        for stored in self._clients.keys() & {digest}:
            if hmac.compare_digest(stored, digest):
                return self._clients[stored]
        return None


def parse_keys(data: bytes, source: str) -> KeyRing:
    """Raises ConfigError that names ``source`` and what is wrong with it."""
    try:
        entries = msgspec.toml.decode(data, type=_File).keys
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:  # also what is no TOML
        raise ConfigError(f"{source} is no file of API keys: {exc}; `pdserve key NAME` prints an entry") from exc
    if not 0 < len(entries) <= MAX_KEYS:
        raise ConfigError(f"{source} has {len(entries)} keys; it must be 1 … {MAX_KEYS}")
    clients: dict[bytes, Client] = {}
    for name, entry in entries.items():
        if not NAME.fullmatch(name):
            raise ConfigError(f"{source}: {name!r} is no name of a key; use up to 64 letters, digits, '_', '.' and '-'")
        limits = {field: getattr(entry, field) for field in Client.__struct_fields__ if field != "name"}
        for text in [entry.sha256] if isinstance(entry.sha256, str) else entry.sha256:
            digest = _digest(text, f"{source}: keys.{name}")
            if digest in clients:
                raise ConfigError(f"{source}: {name} and {clients[digest].name} have the same key; make one for each")
            clients[digest] = Client(name, **limits)
    return KeyRing(clients)


def _digest(text: str, where: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise ConfigError(f"{where}.sha256 is no SHA-256 in hexadecimal; `pdserve key NAME` prints an entry")
    return digest
