"""Start and exit of a node's processes: status lines, signals, exit statuses, no process left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from machine import patience

WAIT_SECONDS = 30.0
SIMULATED = ("--engine", "simulated")
FLAGS = ("--device", "cpu", "--kv-cache-memory", "1MiB", "--max-model-len", "256", "--threads", "1")


class Started:
    """A node started as by ``pdserve up``."""

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
        raise AssertionError(f"it exited before it was {state}: {self.end()}")

    def wait_for_line(self, part: str) -> None:
        """Read lines that it prints up to one with ``part``."""
        assert self.process.stderr is not None
        assert any(part in line for line in self.process.stderr), f"it has printed no line with {part!r}"

    def engine(self) -> psutil.Process:
        return psutil.Process(self.process.pid).children()[0]

    def end(self) -> tuple[int, list[str]]:
        """Wait for its exit; return the status and the lines it printed."""
        _, stderr = self.process.communicate(timeout=patience(WAIT_SECONDS))
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
        process.wait(patience(WAIT_SECONDS))
    except psutil.TimeoutExpired:
        return False
    return True


@pytest.mark.parametrize(
    ("role", "number", "flags"),
    [("prefill_node", signal.SIGTERM, ()), ("decode_node", signal.SIGINT, SIMULATED)],
    ids=["prefill", "decode"],
)
def test_sigterm_and_sigint_end_a_node_with_status_0(
    role: str, number: signal.Signals, flags: tuple[str, ...], checkpoint: Path
) -> None:
    with started(checkpoint, role, *flags) as node:
        address = node.wait_for("listening")["address"]
        node.wait_for("ready")
        assert address.startswith("127.0.0.1:")
        assert any(state["state"] == "loading" for state in node.states)
        engine = node.engine()
        node.process.send_signal(number)
        status, lines = node.end()
        assert status == 0, lines
        assert any(f"ready for gRPC on {address}: " in line for line in lines)
        assert not any("Traceback" in line or "error" in line for line in lines)
        assert gone(engine)


@pytest.mark.parametrize("role", ["prefill", "serve"])
def test_a_node_that_a_user_started_says_how_to_get_http(role: str, checkpoint: Path) -> None:
    command = [sys.executable, "-m", "cli", role, str(checkpoint), "--engine", "simulated"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        hint = next((line for line in process.stderr if "HTTP clients need a router" in line), "")
        process.terminate()
    assert f"pdserve router {checkpoint} {'--node' if role == 'serve' else '--prefill'} 127.0.0.1:" in hint
    assert ("--http PORT of this command" in hint) is (role == "serve")


@pytest.mark.slow
def test_sigterm_while_loading_ends_a_node_with_status_0(checkpoint: Path) -> None:
    with started(checkpoint, "prefill_node") as node:
        node.wait_for("listening")
        node.process.terminate()
        status, lines = node.end()
        assert status == 0, lines
        assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize(
    ("role", "is_ready", "flags"),
    [("decode_node", True, SIMULATED), ("prefill_node", False, ())],
    ids=["ready", "early"],
)
def test_a_node_fails_when_its_engine_is_killed(
    role: str, is_ready: bool, flags: tuple[str, ...], checkpoint: Path
) -> None:
    """Also before the node listens: the engine is started first."""
    with started(checkpoint, role, *flags) as node:
        if is_ready:
            node.wait_for("ready")
        wait_until(lambda: bool(psutil.Process(node.process.pid).children()))
        node.engine().kill()
        assert "SIGKILL" in node.wait_for("failed")["error"]
        status, lines = node.end()
        assert status == 1
        assert "SIGKILL" in lines[-1]
        assert not any("Traceback" in line for line in lines)


def test_a_failed_start_prints_one_line_and_leaves_nothing_open() -> None:
    """The engine process has been started by then. Python's development mode would also report slow callbacks."""
    warnings = ("-W", "always::ResourceWarning")
    command = [sys.executable, *warnings, "-m", "prefill_node", "/nowhere/at/all", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("pdserve: error: model '/nowhere/at/all'")


def test_a_torch_that_cannot_be_imported_is_the_error_of_the_node_which_tries_triton_again_next_time(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing torch again would fail otherwise, once a part of it has been imported."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    success = tmp_path / "pdserve" / "triton-0"
    success.parent.mkdir()
    success.touch()
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import os\n"
        "assert 'IMPORTED' not in os.environ, 'imported twice'\n"
        "os.environ['IMPORTED'] = '1'\n"
        "raise ImportError('libcudart.so is missing')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(package.parent), prepend=os.pathsep)
    with started(checkpoint, "prefill_node") as node:
        assert "libcudart.so is missing" in node.wait_for("failed")["error"]
        status, lines = node.end()
    assert status == 1
    assert "libcudart.so is missing" in lines[-1]
    assert not success.exists()


def test_sigusr1_prints_the_stacks_of_a_process_which_goes_on(checkpoint: Path) -> None:
    with started(checkpoint, "prefill_node", "--engine", "simulated") as node:
        node.wait_for("ready")
        node.engine().send_signal(signal.SIGUSR1)
        node.wait_for_line("engine/process.py")  # its loop may not have begun yet
        node.process.send_signal(signal.SIGUSR1)
        node.wait_for_line("node/node_command.py")
        node.process.terminate()
        status, lines = node.end()
        assert status == 0, lines


def test_the_engine_exits_when_the_lifeline_ends(checkpoint: Path) -> None:
    """The end of the lifeline ends the frontend at once, as SIGKILL would, and that ends the engine."""
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
        (("--decode-ahead", "-1"), ["--decode-ahead", "-1", "at least 0"]),
        (("--advertise", "host:port"), ["host:port"]),
        (("--max-model-len", "0"), ["--max-model-len"]),
        (("--prefil", "x"), ["--prefil"]),
    ],
)
def test_invalid_flags_are_one_line_errors(flags: tuple[str, ...], words: list[str], checkpoint: Path) -> None:
    with started(checkpoint, "prefill_node", *flags) as node:
        status, lines = node.end()
    assert status == 2
    assert len(lines) == 1
    for word in words:
        assert word in lines[0]


def test_a_broken_checkpoint_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with started(tmp_path, "decode_node") as node:
        status, lines = node.end()
    assert status == 2
    assert len(lines) == 1
    assert "config.json" in lines[0]


def test_a_node_listens_only_on_its_port_and_the_ucx_range(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX_TCP_PORT_RANGE sets the ports of UCX, as in deploy/k8s."""
    monkeypatch.setenv("UCX_TCP_PORT_RANGE", "20000-20255")
    with started(checkpoint, "prefill_node") as node:
        node.wait_for("ready")
        _, port = node.states[0]["address"].split(":")
        sockets = (
            listening_port
            for process in (psutil.Process(node.process.pid), node.engine())
            for listening_port in listening(process)
        )
        others = set(sockets) - {int(port)}
    assert others
    assert others <= set(range(20000, 20256))


def listening(process: psutil.Process) -> list[int]:
    return [
        connection.laddr.port
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def probe(address: str, service: str) -> int:
    return subprocess.run([sys.executable, "-m", "cli", "probe", address, service], capture_output=True).returncode


def test_health_separates_live_loaded_and_ready(checkpoint: Path) -> None:
    """A node without its peers is live and loaded, so it is not restarted; with a stopped engine it is not live."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = f"127.0.0.1:{silent.getsockname()[1]}"
        flags = ("--engine", "simulated", "--prefill", peer, "--peer-timeout", f"{patience(1.0):g}")
        with started(checkpoint, "decode_node", *flags, "--peer-wait", "600") as node:
            address = node.wait_for("listening")["address"]
            wait_until(lambda: probe(address, "loaded") == 0)
            assert (probe(address, "live"), probe(address, "")) == (0, 1)
        with started(checkpoint, "decode_node", *flags, "--peer-wait", "0.1") as node:
            node.wait_for("ready")
            address = node.states[0]["address"]
            assert probe(address, "") == 0
            node.engine().suspend()
            wait_until(lambda: probe(address, "live") == 1)
            assert (probe(address, "loaded"), probe(address, "")) == (0, 1)
            node.engine().resume()
            wait_until(lambda: probe(address, "") == 0)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patience(WAIT_SECONDS)
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
