"""How a node's processes begin and end: statuses, signals, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

WAIT_SECONDS = 30.0
FLAGS = ("--device", "cpu", "--kv-cache-memory", "1MiB", "--max-model-len", "256", "--threads", "1")


class Started:
    """A node started as ``pdserve up`` does it."""

    def __init__(self, checkpoint: Path, role: str, *flags: str) -> None:
        status, status_write = os.pipe()
        lifeline, self.lifeline = os.pipe()
        fds = ("--status-fd", str(status_write), "--lifeline-fd", str(lifeline))
        self.process = subprocess.Popen(
            [sys.executable, "-m", role, str(checkpoint), *FLAGS, *fds, *flags],
            pass_fds=(status_write, lifeline),
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(status_write)
        os.close(lifeline)
        self._status = os.fdopen(status)
        self.states: list[dict[str, Any]] = []

    def wait_for(self, state: str) -> dict[str, Any]:
        for line in self._status:
            self.states.append(json.loads(line))
            if self.states[-1]["state"] == state:
                return self.states[-1]
        raise AssertionError(f"it ended before it was {state}: {self.end()}")

    def engine(self) -> psutil.Process:
        return psutil.Process(self.process.pid).children()[0]

    def end(self) -> tuple[int, list[str]]:
        """Wait for its end; returns the exit status and the lines it printed."""
        _, stderr = self.process.communicate(timeout=WAIT_SECONDS)
        return self.process.returncode, stderr.splitlines()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._status.close()
        if self.lifeline >= 0:
            os.close(self.lifeline)


@contextlib.contextmanager
def started(checkpoint: Path, role: str, *flags: str) -> Iterator[Started]:
    node = Started(checkpoint, role, *flags)
    try:
        yield node
    finally:
        node.close()


def gone(process: psutil.Process) -> bool:
    try:
        process.wait(WAIT_SECONDS)
    except psutil.TimeoutExpired:
        return False
    return True


@pytest.mark.parametrize(
    ("role", "number"), [("prefill_node", signal.SIGTERM), ("decode_node", signal.SIGINT)], ids=["prefill", "decode"]
)
def test_a_signal_ends_it_cleanly(role: str, number: signal.Signals, checkpoint: Path) -> None:
    with started(checkpoint, role) as node:
        address = node.wait_for("listening")["address"]
        node.wait_for("ready")
        assert address.startswith("127.0.0.1:")
        assert any(state["state"] == "loading" for state in node.states)
        engine = node.engine()
        node.process.send_signal(number)
        status, lines = node.end()
        assert status == 0, lines
        assert not any("Traceback" in line or "error" in line for line in lines)
        assert gone(engine)


def test_a_signal_while_loading_ends_it(checkpoint: Path) -> None:
    with started(checkpoint, "prefill_node") as node:
        node.wait_for("listening")
        node.process.terminate()
        status, lines = node.end()
        assert status == 0, lines
        assert not any("Traceback" in line for line in lines)


def test_the_engines_death_is_the_nodes(checkpoint: Path) -> None:
    with started(checkpoint, "decode_node") as node:
        node.wait_for("ready")
        node.engine().kill()
        assert "SIGKILL" in node.wait_for("failed")["error"]
        status, lines = node.end()
        assert status == 1
        assert "SIGKILL" in lines[-1]
        assert not any("Traceback" in line for line in lines)


def test_no_engine_outlives_its_parent(checkpoint: Path) -> None:
    """The end of the lifeline ends the front at once, as SIGKILL would, and that ends the engine."""
    with started(checkpoint, "decode_node") as node:
        node.wait_for("loading")
        engine = node.engine()
        os.close(node.lifeline)
        node.lifeline = -1
        node.end()
        assert gone(engine)


def test_a_port_in_use_is_found_before_anything_is_loaded(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with started(checkpoint, "prefill_node", "--port", str(port)) as node:
            assert str(port) in node.wait_for("failed")["error"]
            status, lines = node.end()
    assert status == 2
    assert len(lines) == 1
    assert str(port) in lines[0]
    assert "--port" in lines[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kernel-block-size", "5"), ["5", "16"]),
        (("--lease-seconds", "0"), ["--lease-seconds", "0"]),
        (("--advertise", "host:port"), ["host:port"]),
        (("--max-model-len", "0"), ["--max-model-len"]),
        (("--prefil", "x"), ["--prefil"]),
    ],
)
def test_flags_that_cannot_run(flags: tuple[str, ...], words: list[str], checkpoint: Path) -> None:
    with started(checkpoint, "prefill_node", *flags) as node:
        status, lines = node.end()
    assert status == 2
    assert len(lines) == 1
    for word in words:
        assert word in lines[0]


def test_a_broken_checkpoint_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with started(tmp_path, "decode_node") as node:
        status, lines = node.end()
    assert status == 2
    assert len(lines) == 1
    assert "config.json" in lines[0]
