"""The process that compiles kernels for a node's next start: a stand-in compiler in real processes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest
from machine import patience

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.attention_backends import FlashInferKernel, Platform
from pdserve.config.kernels.background_compile import CompileOrder, compile_command, compiling_beside
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve

SECONDS = 20.0
H200 = DeviceInfo(kind="cuda", index=3, name="NVIDIA H200", memory=141 << 30, capability=(9, 0))
KERNEL = FlashInferKernel("bfloat16", 128, 128, windowed=False)

#: The steps of runner/attention/compile.py with a compiler that sleeps. It writes its pids, and begin and end to a log.
STAND_IN = """
import os, subprocess, sys, time
from pathlib import Path
from pdserve.config.attention_backends import FlashInferKernel
from pdserve.config.kernels.background_compile import compile_missing, end_with_stdin, give_way
from pdserve.config.kernels.flashinfer_hosts import record_compiled

folder, seconds = Path(sys.argv[1]), sys.argv[2]
end_with_stdin()
give_way()

def compile_one(kernel):
    log = (folder / "log").open("a", buffering=1)
    print("begin", file=log)
    compiler = subprocess.Popen(["sleep", seconds])
    (folder / "pids.new").write_text(f"{os.getpid()} {compiler.pid}")
    (folder / "pids.new").rename(folder / "pids")
    compiler.wait()
    library = folder / "kernel.so"
    library.touch()
    record_compiled(kernel, (9, 0), library)
    print("end", file=log)

compile_missing((FlashInferKernel("bfloat16", 128, 128, windowed=False),), (9, 0), compile_one)
"""

#: A node that compiles until it is killed.
NODE = """
import sys, time, msgspec
from pdserve.config.kernels.background_compile import compiling_beside
from pdserve.config.node_config import NodeConfig

with compiling_beside(msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=NodeConfig), sys.argv[2:]):
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def config() -> NodeConfig:
    options = NodeOptions(model=str(EMBEDDED_MODEL), dtype="bfloat16", load_format="dummy")
    chosen = resolve(options, H200, {}, Platform(device="cuda", has_triton=True, has_flashinfer=True))
    return msgspec.structs.replace(chosen, uncompiled_kernels=(KERNEL,))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "cache"))
    return tmp_path


Command = Callable[[float], list[str]]


@pytest.fixture
def stand_in(folder: Path) -> Command:
    return lambda seconds: [sys.executable, "-c", STAND_IN, str(folder), str(seconds)]


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + patience(SECONDS)
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def processes(folder: Path) -> list[psutil.Process]:
    """Wait until the stand-in compiles; return it and its compiler."""
    wait_until((folder / "pids").exists)
    return [psutil.Process(int(pid)) for pid in (folder / "pids").read_text().split()]


def wait_gone(gone: list[psutil.Process]) -> None:
    wait_until(lambda: not any(process.is_running() and process.status() != "zombie" for process in gone))


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """logged(level): the messages of a level."""
    caplog.set_level(logging.INFO, "pdserve.config.kernels.background_compile")
    return lambda level: [record.message for record in caplog.records if record.levelname == level]


def test_the_command_has_the_kernels_and_the_gpu(config: NodeConfig) -> None:
    *_, module, order = compile_command(config)
    assert module == "runner.attention.compile"
    assert msgspec.json.decode(order, type=CompileOrder) == CompileOrder((KERNEL,), 3)


def test_compiled_kernels_are_recorded_and_said(
    config: NodeConfig, folder: Path, stand_in: Command, logged: Callable[[str], list[str]]
) -> None:
    with compiling_beside(config, stand_in(0.01)):
        wait_until(lambda: len(logged("INFO")) == 2)
    assert "at this start" in logged("INFO")[0]
    assert logged("INFO")[1].startswith("FlashInfer's kernels were compiled in ")
    assert logged("WARNING") == []
    assert list((folder / "cache" / ".cache" / "flashinfer" / "pdserve").glob("batch_prefill*.json"))


def test_nothing_to_compile_starts_no_process(config: NodeConfig, logged: Callable[[str], list[str]]) -> None:
    with compiling_beside(msgspec.structs.replace(config, uncompiled_kernels=()), ["/nowhere/python"]):
        pass
    assert logged("INFO") == logged("WARNING") == []


def test_the_compiler_gives_way_to_the_node(config: NodeConfig, folder: Path, stand_in: Command) -> None:
    with compiling_beside(config, stand_in(1000)):
        for process in processes(folder):
            assert process.nice() == 19
            assert Path(f"/proc/{process.pid}/oom_score_adj").read_text().strip() == "1000"


def test_the_compiler_ends_with_the_node(
    config: NodeConfig, folder: Path, stand_in: Command, logged: Callable[[str], list[str]]
) -> None:
    with compiling_beside(config, stand_in(1000)):
        running = processes(folder)
    wait_gone(running)
    assert logged("WARNING") == []


def test_the_compiler_ends_with_a_killed_node(config: NodeConfig, folder: Path, stand_in: Command) -> None:
    command = [sys.executable, "-c", NODE, msgspec.msgpack.encode(config).hex(), *stand_in(1000)]
    with subprocess.Popen(command) as node:
        running = processes(folder)
        node.kill()
    wait_gone(running)


def test_a_killed_compiler_is_one_warning_and_leaves_no_process(
    config: NodeConfig, folder: Path, stand_in: Command, logged: Callable[[str], list[str]]
) -> None:
    """The OOM killer takes it first."""
    with compiling_beside(config, stand_in(1000)):
        running = processes(folder)
        os.kill(running[0].pid, signal.SIGKILL)
        wait_until(lambda: bool(logged("WARNING")))
        wait_gone(running)
    (warning,) = logged("WARNING")
    assert "could not be compiled" in warning
    assert "was killed by SIGKILL" in warning


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["sh", "-c", "echo building; echo nvcc fatal: no space left >&2; exit 1"], "nvcc fatal: no space left"),
        (["sh", "-c", f"echo 'pdserve: error: {'x' * 500} nvcc fatal'; exit 1"], "nvcc fatal"),
        (["sh", "-c", "exit 7"], "ended with status 7"),
        (["/nowhere/python"], "No such file or directory"),
    ],
)
def test_a_failure_is_one_warning(
    config: NodeConfig, command: list[str], reason: str, logged: Callable[[str], list[str]]
) -> None:
    with compiling_beside(config, command):
        wait_until(lambda: bool(logged("WARNING")))
    (warning,) = logged("WARNING")
    assert warning.endswith(reason)
    assert len(warning) < 500


def test_one_process_of_a_machine_compiles_and_the_others_wait_for_it(
    config: NodeConfig, folder: Path, stand_in: Command, logged: Callable[[str], list[str]]
) -> None:
    """Two nodes start at the same moment. The second finds the kernel compiled when it has the lock."""
    with compiling_beside(config, stand_in(1.0)), compiling_beside(config, stand_in(1.0)):
        wait_until(lambda: sum("were compiled" in message for message in logged("INFO")) == 2)
    assert (folder / "log").read_text().split() == ["begin", "end"]


def test_a_dead_compiler_leaves_no_lock(config: NodeConfig, folder: Path, stand_in: Command) -> None:
    with compiling_beside(config, stand_in(1000)):
        running = processes(folder)
    wait_gone(running)
    with compiling_beside(config, stand_in(0.01)):
        wait_until(lambda: "end" in (folder / "log").read_text())


def test_a_cache_without_records_is_an_error(config: NodeConfig, logged: Callable[[str], list[str]]) -> None:
    """Each start would compile again without a word."""
    code = (
        "from pdserve.config.attention_backends import FlashInferKernel\n"
        "from pdserve.config.kernels.background_compile import compile_missing\n"
        "from pdserve.host.process import run_command\n"
        "kernel = FlashInferKernel('bfloat16', 128, 128, windowed=False)\n"
        "run = lambda: compile_missing((kernel,), (9, 0), lambda kernel: None)\n"
        "raise SystemExit(run_command(run))\n"
    )
    with compiling_beside(config, [sys.executable, "-c", code]):
        wait_until(lambda: bool(logged("WARNING")))
    (warning,) = logged("WARNING")
    assert "no record of the compiled kernels can be kept in " in warning
