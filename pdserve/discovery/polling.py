"""Places that do not tell of changes: they are asked again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

from pdserve.errors import ConfigError

_log = logging.getLogger(__name__)


async def polled(
    what: str, look: Callable[[], Awaitable[frozenset[str]]], interval: float
) -> AsyncGenerator[frozenset[str], None]:
    """What ``look`` returns, when it is another than before; ``interval`` seconds between looks.

    A failure (OSError, UnicodeDecodeError, ConfigError) is logged once and changes nothing: nodes outlive whoever lists
    them.
    """
    known: frozenset[str] | None = None
    failure = ""
    while True:
        try:
            found = await look()
        except (OSError, UnicodeDecodeError, ConfigError) as exc:
            if str(exc) != failure:
                failure = str(exc)
                _log.warning("%s cannot be used: %s; what is known of it stays", what, failure)
        else:
            failure = ""
            if found != known:
                known = found
                yield found
        await asyncio.sleep(interval)
