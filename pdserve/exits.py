"""How a command of the ``pdserve`` CLI ends: a status, and for an error one line on stderr."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from pdserve.errors import PdserveError
from pdserve.process import exit_status, one_line

EXIT_INTERRUPTED = 130  # as a shell reports SIGINT


def run_command(command: Callable[[], int]) -> int:
    """Call ``command`` and return its status; an exception becomes one line on stderr and a non-zero status.

    ``PDSERVE_TRACEBACK=1`` shows the traceback as well.
    """
    try:
        return command()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as exc:
        hint = "" if isinstance(exc, PdserveError) else " (PDSERVE_TRACEBACK=1 shows where)"
        print(f"pdserve: error: {one_line(exc)}{hint}", file=sys.stderr)
        if os.environ.get("PDSERVE_TRACEBACK", "0") not in ("", "0"):
            traceback.print_exc()
        return exit_status(exc)
