"""Polls sources that do not announce changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

from pdserve.errors import ConfigError

_log = logging.getLogger(__name__)


async def polled(
    name: str, query: Callable[[], Awaitable[frozenset[str]]], interval: float
) -> AsyncGenerator[frozenset[str], None]:
    """Yield the result of ``query`` whenever it has changed; ``interval`` is in seconds.

    A failure (OSError, UnicodeDecodeError, ConfigError) is logged once and changes nothing, because nodes outlive their
    sources.
    """
    known: frozenset[str] | None = None
    failure = ""
    while True:
        try:
            found = await query()
        except (OSError, UnicodeDecodeError, ConfigError) as exc:
            if str(exc) != failure:
                failure = str(exc)
                _log.warning("%s cannot be read: %s; its known addresses stay in use", name, failure)
        else:
            failure = ""
            if found != known:
                known = found
                yield found
        await asyncio.sleep(interval)
