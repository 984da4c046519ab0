"""Loads of adapters to the host memory of one rank, on a thread beside the steps."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pdserve.adapters.adapter import Adapter, AdapterLoaded
from pdserve.errors import PdserveError
from pdserve.host.process import log_failure, one_line
from pdserve.protocols import ModelRunner

_log = logging.getLogger(__name__)


class AdapterLoads:
    """One load at a time, in the order of ``begin``. ``on_end`` is called on the thread after each."""

    def __init__(self, runner: ModelRunner, on_end: Callable[[], None]) -> None:
        self._runner = runner
        self._on_end = on_end
        self._ended: deque[AdapterLoaded] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, adapter: Adapter) -> None:
        """Begin to load an adapter; ``take_ended`` reports the end."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "adapter loads")
        self._thread.submit(self._load, adapter)

    def take_ended(self) -> tuple[AdapterLoaded, ...]:
        """Return the loads that have ended since the last call."""
        return tuple(self._ended.popleft() for _ in range(len(self._ended)))

    def close(self) -> None:
        """Wait for the load that runs, and drop the others. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _load(self, adapter: Adapter) -> None:
        error = ""
        try:
            self._runner.load_adapter(adapter)
        except PdserveError as exc:
            error = str(exc)
        except Exception as exc:  # running requests do not depend on this adapter
            log_failure(_log, exc)
            error = one_line(exc)
        self._ended.append(AdapterLoaded(adapter.digest, error))
        self._on_end()
