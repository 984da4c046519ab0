"""One log format for every process: time, level, role, message, on stderr."""

from __future__ import annotations

import logging
import os
import sys


def setup_logging(role: str) -> None:
    """Log to stderr at ``PDSERVE_LOG_LEVEL`` (default INFO). Call once, in a process's main."""
    level = os.environ.get("PDSERVE_LOG_LEVEL", "INFO").upper()
    known = level in logging.getLevelNamesMapping()
    logging.basicConfig(
        stream=sys.stderr,
        level=level if known else logging.INFO,
        format=f"%(asctime)s.%(msecs)03d %(levelname)-7s {role}: %(message)s",
        datefmt="%H:%M:%S",
    )
    if not known:
        logging.warning("PDSERVE_LOG_LEVEL %r is no level; using INFO", level)
