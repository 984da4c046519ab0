"""Reload files that change while the router runs: API keys, certificates."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.rpc.tls import file_stamp

logger = logging.getLogger(__name__)

CHECK_SECONDS = 1.0


class FileReloader(ABC):
    """Base of objects made from ``paths``. Broken files are logged once and retried each second.

    Subclasses load after ``__init__``, so that a change during the first load is noticed.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises ConfigError if a file cannot be read."""
        self._paths = paths
        self._stamp = self._stat()

    @abstractmethod
    async def _load(self) -> None:
        """Use the new content. Raises ConfigError and keeps the previous content if it is broken."""

    async def watch(self, on_reload: Callable[[bool], None] = lambda success: None) -> None:
        """Reload on changes until cancelled. ``on_reload`` receives whether a change took effect."""
        problem = ""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            try:
                stamp = await asyncio.to_thread(self._stat)
                if stamp == self._stamp:
                    continue
                await self._load()
            except ConfigError as exc:
                if str(exc) != problem:
                    logger.error("%s; the previous content stays in use", exc)
                    on_reload(False)
                problem = str(exc)
            else:
                self._stamp = stamp
                problem = ""
                logger.info("%s was reloaded", self._paths[0])
                on_reload(True)

    def _stat(self) -> list[tuple[int, int, int]]:
        return [file_stamp(path) for path in self._paths]
