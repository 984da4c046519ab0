"""``python -m router``: the router as a process of its own."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from pdserve.errors import PdserveError
from pdserve.exits import run_command
from pdserve.logs import setup_logging
from pdserve.process import StatusWriter, one_line, watch_lifeline
from router.options import RouterOptions, parse_options


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal comes. A start that fails is one line on stderr and a non-zero status."""
    return run_command(lambda: run(parse_options(argv)))


def run(options: RouterOptions) -> int:
    """Serve until a signal comes; raises, and tells the parent, when the router cannot start."""
    status = StatusWriter(options.status_fd)
    watch_lifeline(options.lifeline_fd)
    setup_logging("router", options.log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    # Read when gRPC starts. What a router forks executes another program at once; with gRPC's handlers around a fork
    # the new process's pipe was closed now and then (4 of 28, on busy cores).
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    from router.server import serve  # imported here: a wrong flag is found without waiting for FastAPI

    try:
        serve(options, status)
    except PdserveError as exc:
        status.failed(one_line(exc))
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
