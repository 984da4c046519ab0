"""Addresses in a file, one per line; the file may be replaced at any time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from pdserve.discovery.polling import polled

_INTERVAL = 1.0  # seconds between reads


class AddressFile:
    """Empty lines and lines that begin with # are skipped. A malformed file changes nothing."""

    def __init__(self, path: Path, check: Callable[[str], str], interval: float = _INTERVAL) -> None:
        """``check`` returns the address or raises ConfigError."""
        self._path = path
        self._check = check
        self._interval = interval

    def addresses(self) -> AsyncGenerator[frozenset[str], None]:
        return polled(str(self._path), self._read, self._interval)

    async def _read(self) -> frozenset[str]:
        lines = map(str.strip, self._path.read_text(encoding="utf-8").splitlines())
        return frozenset(self._check(line) for line in lines if line and not line.startswith("#"))
