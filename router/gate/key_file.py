"""A file of API keys that may change while the router runs, such as a mounted Secret."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from pdserve.errors import ConfigError
from router.gate.keys import Client, KeyRing, parse_keys

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks at the file

Stamp = tuple[int, int, int]


class KeyFile:
    """The keys as last read. A file that is broken or gone leaves those of before in force, and is logged once."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError when the file cannot be used."""
        self._path = Path(path)
        self._stamp, self._ring = self._read()
        self.on_reload: Callable[[bool], None] = lambda success: None

    def client_of(self, key: bytes) -> Client | None:
        return self._ring.client_of(key)

    @property
    def clients(self) -> list[Client]:
        return self._ring.clients

    async def watch(self) -> None:
        """Read the file again whenever it has changed, for ever. Kubernetes swaps a link, editors rename."""
        complaint = ""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                if await asyncio.to_thread(self._look) == self._stamp:
                    continue
                self._stamp, self._ring = await asyncio.to_thread(self._read)
            except ConfigError as exc:
                if str(exc) != complaint:
                    logger.error("%s; the keys of before stay in force", exc)
                    self.on_reload(False)
                complaint = str(exc)
            else:
                complaint = ""
                logger.info("%s was read again: %s", self._path, ", ".join(sorted({c.name for c in self.clients})))
                self.on_reload(True)

    def _look(self) -> Stamp:
        try:
            found = self._path.stat()
        except OSError as exc:
            raise ConfigError(f"--api-keys {self._path} cannot be read: {exc.strerror}") from exc
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _read(self) -> tuple[Stamp, KeyRing]:
        stamp = self._look()  # before the content: a change in between is noticed next time
        try:
            data = self._path.read_bytes()
        except OSError as exc:
            raise ConfigError(f"--api-keys {self._path} cannot be read: {exc.strerror}") from exc
        return stamp, parse_keys(data, str(self._path))
