"""Jobs for threads beside the step loop, fair between clients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

from pdserve.fairness.fair_turns import FairTurns
from pdserve.grammar import start_thread

Job = TypeVar("Job")


class FairJobs(Generic[Job]):
    """Threads that do the jobs of all clients. Jobs of one client occupy at most all threads but one."""

    def __init__(self, num_threads: int, work: Callable[[Job], None], name: str) -> None:
        """Start the threads. ``work`` must not raise."""
        self._work = work
        self._turns = FairTurns[int, Job](num_threads)
        self._changed = threading.Condition()
        for number in range(num_threads):
            start_thread(self._run, f"{name} {number}")

    def put(self, client: int, job: Job) -> None:
        with self._changed:
            self._turns.push(client, job)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while (turn := self._turns.begin()) is None:
                    self._changed.wait()
            client, job = turn
            begun = monotonic()
            self._work(job)
            with self._changed:
                self._turns.end(client, monotonic() - begun)
                self._changed.notify()
