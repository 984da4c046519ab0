"""Addresses in a file, a line each, that whoever keeps the list may replace at any time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from pdserve.errors import ConfigError

_log = logging.getLogger(__name__)

_INTERVAL = 1.0  # seconds between looks


class AddressFile:
    """Empty lines and those that begin with # are skipped. A file that cannot be understood changes nothing."""

    def __init__(self, path: Path, check: Callable[[str], str], interval: float = _INTERVAL) -> None:
        """``check`` returns an address, or raises ConfigError."""
        self._path = path
        self._check = check
        self._interval = interval

    async def addresses(self) -> AsyncGenerator[frozenset[str], None]:
        known: frozenset[str] | None = None
        failure = ""
        while True:
            try:
                found = self._read()
            except (OSError, UnicodeDecodeError, ConfigError) as exc:
                if str(exc) != failure:
                    failure = str(exc)
                    _log.warning("%s cannot be used: %s; what it said before stays", self._path, failure)
            else:
                failure = ""
                if found != known:
                    known = found
                    yield found
            await asyncio.sleep(self._interval)

    def _read(self) -> frozenset[str]:
        lines = map(str.strip, self._path.read_text(encoding="utf-8").splitlines())
        return frozenset(self._check(line) for line in lines if line and not line.startswith("#"))
