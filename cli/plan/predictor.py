"""Predictions of several fleets at once, in processes of their own, with a line that says what runs."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from threading import Lock
from types import TracebackType

from cli.plan.prediction import Layout, PlannedLoad, Prediction, predict
from cli.plan.workload import Workload

_load: PlannedLoad | None = None  # a worker process has it


class Predictor:
    """Simulates fleets under a load. A context manager: its end stops the processes.

    Each simulation is deterministic, so the number of processes changes no result.
    """

    def __init__(self, load: PlannedLoad, workers: int = 0) -> None:
        """``workers`` 0: a process per CPU that this one may use; 1: this process alone."""
        self.load = load
        self._samples: dict[int, Workload] = {}
        self._predictions: dict[tuple[Layout, float], Prediction] = {}
        self._lock = Lock()
        self._shows = sys.stderr.isatty()
        self._pool: ProcessPoolExecutor | None = None
        if (workers := workers or len(os.sched_getaffinity(0))) > 1:
            # Fork before there is a thread: children have the load, and need not import anything.
            self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _keep, (load,))
            self._pool.submit(os.getpid).result()

    def __enter__(self) -> Predictor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if self._shows:
            print(f"\r{' ' * 79}\r", end="", file=sys.stderr, flush=True)

    def predict(self, layouts: Iterable[Layout], rate: float) -> dict[Layout, Prediction]:
        """Predict fleets at a rate; each fleet and rate is simulated once. Threads may call it at once."""
        layouts = list(layouts)
        missing = [layout for layout in layouts if (layout, rate) not in self._predictions]
        self._show(missing, rate)
        if self._pool is None:
            results = [predict(self.load, layout, rate, self._sample(layout)) for layout in missing]
        else:
            futures = [self._pool.submit(_predict, layout, rate, self._sample(layout)) for layout in missing]
            results = [future.result() for future in futures]
        for layout, prediction in zip(missing, results, strict=True):
            self._predictions[layout, rate] = prediction
        return {layout: self._predictions[layout, rate] for layout in layouts}

    def _sample(self, layout: Layout) -> Workload:
        with self._lock:
            if layout.nodes not in self._samples:
                self._samples[layout.nodes] = self.load.sample(layout.nodes)
            return self._samples[layout.nodes]

    def _show(self, layouts: Iterable[Layout], rate: float) -> None:
        names = ", ".join(map(str, layouts))
        if self._shows and names:
            text = f"{len(self._predictions)} simulated, next: {names} at {rate:.3g} requests/s"
            print(f"\r{text[:79]:<79}", end="", file=sys.stderr, flush=True)


def _keep(load: PlannedLoad) -> None:
    global _load
    _load = load


def _predict(layout: Layout, rate: float, sample: Workload) -> Prediction:
    assert _load is not None
    return predict(_load, layout, rate, sample)
