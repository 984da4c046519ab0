"""Exit status of ``pdserve`` commands. An error becomes one line on stderr."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from pdserve.errors import ConfigError, PdserveError
from pdserve.logs import chosen_format, json_line
from pdserve.process import exit_status, one_line

EXIT_INTERRUPTED = 130  # as a shell reports SIGINT


def run_command(command: Callable[[], int]) -> int:
    """Return the status of ``command``; print an exception as one line. ``PDSERVE_TRACEBACK=1`` adds the traceback."""
    try:
        _check_byte_order()
        return command()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as exc:
        hint = "" if isinstance(exc, PdserveError) else " (set PDSERVE_TRACEBACK=1 for a traceback)"
        stack = os.environ.get("PDSERVE_TRACEBACK", "0") not in ("", "0")
        say(f"pdserve: error: {one_line(exc)}{hint}", traceback.format_exc() if stack else "")
        return exit_status(exc)


def _check_byte_order() -> None:
    """Raise ConfigError on a big-endian machine: token ids, block digests and messages are little-endian in memory."""
    if sys.byteorder != "little":
        raise ConfigError(f"this machine is {sys.byteorder}-endian; pdserve runs on little-endian machines only")


def say(text: str, stack: str = "", level: str = "CRITICAL") -> None:
    """Print a line on stderr regardless of the log level, as JSON if that is the log format."""
    if chosen_format() == "json":
        text, stack = json_line(level, "pdserve", text, None, {"stack": stack} if stack else {}), ""
    print(text, stack, sep="\n" if stack else "", end="" if stack else "\n", file=sys.stderr, flush=True)
