"""``python -m router``: the router process."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Sequence

from pdserve.errors import PdserveError
from pdserve.host.process import StatusWriter, run_command, watch_lifeline
from pdserve.logs import setup_logging
from router.options import RouterOptions, make_parser, parse_options

__all__ = ["main", "make_parser"]  # names that cli/commands.py needs


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal. A failed start prints one line on stderr and returns a non-zero status."""
    return run_command(lambda: run(parse_options(argv)))


def run(options: RouterOptions) -> int:
    """Serve until a signal. A failed start is reported to the parent and raised."""
    status = StatusWriter(options.status_fd)
    watch_lifeline(options.lifeline_fd)
    setup_logging("router", options.log_format, options.log_level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    # gRPC reads this at start. The router's child processes exec at once; gRPC's fork handlers sometimes closed the
    # child's pipe (4 of 28 starts on busy cores).
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    gc.disable()  # the import makes hardly any garbage, and collection would take a tenth of its time
    from router.server import serve  # a late import: a wrong flag is reported without loading FastAPI

    gc.enable()

    try:
        serve(options, status)
    except PdserveError as exc:
        status.failed(exc)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
