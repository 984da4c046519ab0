"""``python -m launcher``: the command ``pdserve up``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launcher.up import up
from launcher.up_flags import make_parser
from pdserve.process import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal. A failed start prints one line on stderr and returns a non-zero status."""
    return run_command(lambda: up(make_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
