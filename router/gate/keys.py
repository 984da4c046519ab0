"""The clients of a router and their API keys, as a TOML file describes them. It is reloaded when it changes.

[keys.alice]
sha256 = "…"                  # from `pdserve key alice`; a list while a key is being replaced
requests_per_minute = 600     # all limits are optional
tokens_per_minute = 100_000   # prompt and output tokens
max_concurrent = 16           # requests
best_priority = 0             # lower priorities in requests count as this one
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Network, ip_address
from pathlib import Path
from typing import Annotated

import msgspec

from pdserve.api_keys import NAME, key_digest
from pdserve.errors import ConfigError
from router.file_reload import FileReloader

MAX_KEYS = 10_000  # each name is a metrics label
Count = Annotated[int, msgspec.Meta(ge=1)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a client; None: unlimited."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_concurrent: Count | None = None
    best_priority: int | None = None


class Client(Limits, frozen=True):
    """An authenticated client. ``name`` labels logs and metrics; it is empty without API keys."""

    name: str = ""


ANONYMOUS = Client()


def fairness_key(client: Client, address: str) -> str:
    """Return what requests of one client have in common: its name, else its IPv4 address or IPv6 /64 network."""
    if client.name:
        return client.name
    try:
        ip = ip_address(address)
    except ValueError:  # a Unix socket has no address
        return ""
    if isinstance(ip, IPv4Address):
        return address
    return str(ip.ipv4_mapped or IPv6Network((int(ip) >> 64 << 64, 64)))


class _Entry(Limits, frozen=True, kw_only=True):
    sha256: str | list[str]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: dict[str, _Entry]


class KeyRing:
    """Clients by the SHA-256 of their keys.

    The time of a lookup reveals nothing of a stored hash: it compares a digest of the presented key, which an attacker
    cannot steer, and Python keys the hash of bytes anew in each process.
    """

    def __init__(self, clients: Mapping[bytes, Client]) -> None:
        self._clients = dict(clients)

    def client_of(self, key: bytes) -> Client | None:
        digest = key_digest(key)
        for stored in self._clients.keys() & {digest}:
            if hmac.compare_digest(stored, digest):
                return self._clients[stored]
        return None


def parse_keys(data: bytes, source: str) -> KeyRing:
    """Raises ConfigError that names ``source``."""
    try:
        entries = msgspec.toml.decode(data, type=_File).keys
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:  # invalid TOML, too
        raise ConfigError(f"{source} is not a file of API keys: {exc}; `pdserve key NAME` prints an entry") from exc
    if not 0 < len(entries) <= MAX_KEYS:
        raise ConfigError(f"{source} has {len(entries)} keys; it must have 1 … {MAX_KEYS}")
    clients: dict[bytes, Client] = {}
    for name, entry in entries.items():
        if not NAME.fullmatch(name):
            raise ConfigError(f"{source}: key name {name!r} is invalid; use up to 64 letters, digits, '_', '.' and '-'")
        client = Client(name=name, **{field: getattr(entry, field) for field in Limits.__struct_fields__})
        for text in [entry.sha256] if isinstance(entry.sha256, str) else entry.sha256:
            digest = _digest(text, f"{source}: keys.{name}")
            if digest in clients:
                raise ConfigError(f"{source}: {name} and {clients[digest].name} have the same key; make one for each")
            clients[digest] = client
    return KeyRing(clients)


def _digest(text: str, field: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise ConfigError(f"{field}.sha256 is not a hexadecimal SHA-256; `pdserve key NAME` prints an entry")
    return digest


class KeyFile(FileReloader):
    """The keys as of the last successful load."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError if the file cannot be used."""
        self._path = Path(path)
        super().__init__([self._path])
        self._keys = self._read()

    def client_of(self, key: bytes) -> Client | None:
        return self._keys.client_of(key)

    async def _load(self) -> None:
        self._keys = await asyncio.to_thread(self._read)

    def _read(self) -> KeyRing:
        try:
            data = self._path.read_bytes()
        except OSError as exc:
            raise ConfigError(f"--api-keys {self._path} cannot be read: {exc.strerror}") from exc
        return parse_keys(data, str(self._path))
