"""The file of API keys, reloaded when it changes, for example as a mounted Secret."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from pdserve.errors import ConfigError
from router.file_reload import FileReloader
from router.gate.keys import Client, KeyRing, parse_keys


class KeyFile:
    """The keys as of the last successful load."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError if the file cannot be used."""
        self._path = Path(path)
        self._reloader = FileReloader([self._path])
        self._keys = self._read()

    def client_of(self, key: bytes) -> Client | None:
        return self._keys.client_of(key)

    async def watch(self, on_reload: Callable[[bool], None]) -> None:
        """Reload the file on changes until cancelled."""
        await self._reloader.watch(self._load, on_reload)

    async def _load(self) -> None:
        self._keys = await asyncio.to_thread(self._read)

    def _read(self) -> KeyRing:
        try:
            data = self._path.read_bytes()
        except OSError as exc:
            raise ConfigError(f"--api-keys {self._path} cannot be read: {exc.strerror}") from exc
        return parse_keys(data, str(self._path))
