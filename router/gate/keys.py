"""The clients of a router and their API keys, as a TOML file describes them. It is reloaded when it changes.

[keys.alice]
sha256 = "…"                  # from `pdserve key alice`; a list while a key is being replaced
requests_per_minute = 600     # all limits are optional
tokens_per_minute = 100_000   # prompt and output tokens
max_concurrent = 16           # requests
best_priority = 0             # lower priorities in requests count as this one
tenant = "acme"               # keys of one tenant share cached prefixes; default: the name
# share = true                # in place of tenant: share cached prefixes with all such keys
# admin = true                # may load and unload LoRA adapters
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Network, ip_address
from pathlib import Path
from typing import Annotated

import msgspec

from pdserve.errors import ConfigError, shown
from router.file_reload import FileReloader
from router.gate.api_keys import NAME, key_digest

MAX_KEYS = 10_000  # each name is a metrics label
_PREFIX_BYTES = 4  # digest bytes that index keys; nearly unique among MAX_KEYS
Count = Annotated[int, msgspec.Meta(ge=1)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a client; None: unlimited."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_concurrent: Count | None = None
    best_priority: int | None = None


class Client(Limits, frozen=True):
    """An authenticated client. ``name`` is empty without API keys, ``tenant`` is empty if the key shares its cache."""

    name: str = ""
    tenant: str = ""
    admin: bool = False

    @property
    def owner(self) -> str:
        """The owner of the client's stored responses: its tenant, else the key."""
        return f"tenant {self.tenant}" if self.tenant else f"key {self.name}"

    def cache_salt(self, salt: str) -> str:
        """Return the salt for nodes. No ``salt`` of a client gives that of another tenant, nor the shared one."""
        if not (self.tenant or (self.name and salt)):
            return salt
        return hashlib.sha256(f"{self.tenant}\0{salt}".encode()).hexdigest()  # a tenant's name has no \0


ANONYMOUS = Client()


def fairness_key(client: Client, address: str) -> str:
    """Return the key of fairness between clients: the client's name, else the network of its address."""
    return client.name or network_of(address)


def network_of(address: str) -> str:
    """Return an IPv4 address or an IPv6 /64 network; empty for a Unix socket."""
    try:
        ip = ip_address(address)
    except ValueError:
        return ""
    if isinstance(ip, IPv4Address):
        return address
    return str(ip.ipv4_mapped or IPv6Network((int(ip) >> 64 << 64, 64)))


class _Entry(Limits, frozen=True, kw_only=True):
    sha256: str | list[str]
    tenant: str | None = None
    share: bool = False
    admin: bool = False


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: dict[str, _Entry]


class KeyRing:
    """Clients by the SHA-256 of their keys.

    The time of a lookup depends only on the first bytes of the presented key's digest: the rest is compared in constant
    time. Keys that begin alike have unrelated digests.
    """

    def __init__(self, clients: Mapping[bytes, Client]) -> None:
        self._by_prefix: dict[bytes, list[tuple[bytes, Client]]] = {}
        for digest, client in clients.items():
            self._by_prefix.setdefault(digest[:_PREFIX_BYTES], []).append((digest, client))

    def client_of(self, key: bytes) -> Client | None:
        digest = key_digest(key)
        for stored, client in self._by_prefix.get(digest[:_PREFIX_BYTES], ()):
            if hmac.compare_digest(stored, digest):
                return client
        return None


def single_key(key: str) -> KeyRing:
    """A key that all clients use, without limits."""
    return KeyRing({key_digest(key.encode()): Client(name="api-key")})


def parse_keys(data: bytes, source: str) -> KeyRing:
    """Raises ConfigError that names ``source``."""
    try:
        entries = msgspec.toml.decode(data, type=_File).keys
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:  # invalid TOML, too
        raise ConfigError(f"{source} is not a file of API keys: {exc}; `pdserve key NAME` prints an entry") from exc
    if not 0 < len(entries) <= MAX_KEYS:
        raise ConfigError(f"{source} has {len(entries)} keys; it must have 1 … {MAX_KEYS}")
    clients: dict[bytes, Client] = {}
    for name, entry in entries.items():
        _check_name(name, f"{source}: key name")
        client = _client(name, entry, f"{source}: keys.{name}")
        for text in [entry.sha256] if isinstance(entry.sha256, str) else entry.sha256:
            digest = _digest(text, f"{source}: keys.{name}")
            if digest in clients:
                raise ConfigError(f"{source}: {name} and {clients[digest].name} have the same key; make one for each")
            clients[digest] = client
    return KeyRing(clients)


def _client(name: str, entry: _Entry, field: str) -> Client:
    if entry.tenant is not None:
        if entry.share:
            raise ConfigError(f"{field} has both tenant and share; a shared cache belongs to no tenant: remove one")
        _check_name(entry.tenant, f"{field}.tenant")
    limits = {limit: getattr(entry, limit) for limit in Limits.__struct_fields__}
    return Client(name=name, tenant="" if entry.share else entry.tenant or name, admin=entry.admin, **limits)


def _check_name(text: str, field: str) -> None:
    if not NAME.fullmatch(text):
        raise ConfigError(f"{field} {shown(text)} is invalid; use up to 64 letters, digits, '_', '.' and '-'")


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
