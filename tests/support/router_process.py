"""A router as a process of its own, started as a supervisor starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from machine import patience

MODEL = "small"


class RouterProcess:
    def __init__(self, process: subprocess.Popen[bytes], states: list[dict[str, str]]) -> None:
        self.process = process
        self.states = states

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def address(self) -> str:
        return next(state["address"] for state in self.states if state["state"] == "listening")

    @property
    def url(self) -> str:
        return f"http://{self.address}"


@contextmanager
def router_process(
    model_dir: Path | None, flags: Sequence[str], until: str = "ready", seconds: float = 20.0, files: int | None = None
) -> Iterator[RouterProcess]:
    """Runs until the block ends. Entered once the router has reported the state ``until``.

    Without ``model_dir`` the flags name the models. ``files``: limit of its open files.
    """
    status, child_status = os.pipe()
    lifeline, parent_lifeline = os.pipe()
    model = [] if model_dir is None else [str(model_dir), "--served-model-name", MODEL]
    argv = [sys.executable, "-m", "router", *model, "--port", "0", *flags]
    argv += ["--status-fd", str(child_status), "--lifeline-fd", str(lifeline)]
    if files is not None:
        argv = ["prlimit", f"--nofile={files}:{files}", *argv]
    process = subprocess.Popen(argv, pass_fds=(child_status, lifeline))
    os.close(child_status)
    os.close(lifeline)
    try:
        with os.fdopen(status) as lines:
            yield RouterProcess(process, _read_states(lines, until, time.monotonic() + patience(seconds)))
    finally:
        os.close(parent_lifeline)
        process.wait(timeout=patience(10))


def _read_states(lines: Iterator[str], until: str, deadline: float) -> list[dict[str, str]]:
    states: list[dict[str, str]] = []
    for line in lines:
        states.append(json.loads(line))
        if states[-1]["state"] in (until, "failed"):
            break
        assert time.monotonic() < deadline, states
    assert states, "the router said nothing"
    assert states[-1]["state"] == until, states
    return states


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + patience(seconds), f"not within {patience(seconds):.1f} s"
        time.sleep(0.01)
