"""A router whose event loop writes its longest delays to a file: the process that bench/body_uploads.py measures.

    BODY_UPLOADS_RESULT=result.json python bench/timed_router.py MODEL --port 8000 …

It measures as soon as the file exists.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from router import loop_lag

RESULT = "BODY_UPLOADS_RESULT"  # variable with the file's name
TIMER = 0.01  # seconds


class Timer(loop_lag.LoopLag):
    """Measures the loop by the time between two runs of the router's own timer, and what its thread did meanwhile."""

    lag = 0.0
    cpu = 0.0
    held = 0.0

    def start(self) -> None:
        super().start()
        self._cpu = time.thread_time()
        self._waited = _waited()

    def _tick(self) -> None:
        lag = time.monotonic() - self._armed - TIMER
        cpu = time.thread_time() - self._cpu
        held = lag - (_waited() - self._waited)
        if Path(os.environ[RESULT]).exists():  # else the router has not begun to serve
            self.lag = max(self.lag, lag)
            self.cpu = max(self.cpu, cpu)
            self.held = max(self.held, held)
            text = json.dumps({"lag_ms": 1e3 * self.lag, "cpu_ms": 1e3 * self.cpu, "held_ms": 1e3 * self.held})
            Path(os.environ[RESULT]).write_text(text)
        super()._tick()


def _waited() -> float:
    """Return the seconds for which this thread was ready to run and had no CPU."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


if __name__ == "__main__":
    loop_lag.LoopLag = Timer  # type: ignore[misc]  # before the router's modules import it
    from router.__main__ import main

    sys.exit(main())
