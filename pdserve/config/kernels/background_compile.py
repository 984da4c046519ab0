"""Compiles FlashInfer's kernels while a node serves, for its next start: a process that ends with the node.

node ── stdin: a lifeline ──► runner/attention/compile.py ──► ninja ──► nvcc
                               └ leads a process group
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec

from pdserve.config.attention_backends import FlashInferKernel
from pdserve.config.kernels.flashinfer_hosts import cache_folder, missing_kernels
from pdserve.config.node_config import NodeConfig
from pdserve.errors import NodeError
from pdserve.host.cpus import usable_cpus
from pdserve.host.process import describe_exit

_log = logging.getLogger(__name__)

_END_SECONDS = 5.0  # until ninja has ended its compilers
_PART_OF_ERROR = 200  # characters
_NICENESS = 19
_LOCK = "compile.lock"


class CompileOrder(msgspec.Struct, frozen=True):
    """The argument of the process, as JSON."""

    kernels: tuple[FlashInferKernel, ...]
    device: int  # index of the GPU


def compile_command(config: NodeConfig) -> list[str]:
    order = CompileOrder(config.uncompiled_kernels, config.device.index)
    return [sys.executable, "-P", "-m", "runner.attention.compile", msgspec.json.encode(order).decode()]


# ---------------------------------------------------------------- the node


@contextmanager
def compiling_beside(config: NodeConfig, command: Sequence[str] = ()) -> Iterator[None]:
    """Compile the configuration's uncompiled kernels during the block; end the process with the block.

    A failure is a warning: the node serves on. ``command`` is another one, for tests.
    """
    if not config.uncompiled_kernels:
        yield
        return
    _log.info(
        "attention by Triton at this start: FlashInfer's kernels are compiled meanwhile at low priority, for 1 to 3 "
        "minutes, and the next start uses them"
    )
    with ExitStack() as stack:
        try:
            output = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                command or compile_command(config),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its group has ninja
            )
        except OSError as exc:
            _warn(exc.strerror or str(exc))
        else:
            ended = threading.Event()
            watch = threading.Thread(target=_report, args=(process, output, ended), name="compile", daemon=True)
            watch.start()
            stack.callback(_end, process, watch)
            stack.callback(ended.set)
        yield


def _report(process: subprocess.Popen[bytes], output: IO[bytes], ended: threading.Event) -> None:
    """Wait for the process, and log how it ended, unless the node has ended it."""
    started = time.monotonic()
    status = process.wait()
    if status < 0:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # ninja goes on without it
    if ended.is_set():
        return
    if status == 0:
        _log.info("FlashInfer's kernels were compiled in %.0f s: the next start uses them", time.monotonic() - started)
        return
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines()
    _warn(
        lines[-1].removeprefix("pdserve: error: ") if lines and status > 0 else f"its process {describe_exit(status)}"
    )


def _warn(reason: str) -> None:
    if len(reason) > 2 * _PART_OF_ERROR:  # a compiler's last words say most
        reason = f"{reason[:_PART_OF_ERROR]} … {reason[-_PART_OF_ERROR:]}"
    _log.warning("FlashInfer's kernels could not be compiled, so attention stays Triton's: %s", reason)


def _end(process: subprocess.Popen[bytes], watch: threading.Thread) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
    assert process.stdin is not None
    process.stdin.close()
    watch.join(_END_SECONDS)


# ---------------------------------------------------------------- the process


def end_with_stdin() -> None:
    """Send SIGTERM to this process group once stdin ends. Ninja passes it on to its compilers."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(0, signal.SIGTERM)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def give_way() -> None:
    """Leave CPUs to the node: the lowest priority, and half of them, as a container's limit knows no priority.

    Where memory runs out, the kernel ends this process and its compilers first.
    """
    os.nice(_NICENESS)
    os.environ.setdefault("MAX_JOBS", str(max(1, usable_cpus() // 2)))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def compile_missing(
    kernels: tuple[FlashInferKernel, ...],
    capability: tuple[int, int],
    compile_one: Callable[[FlashInferKernel], None],
) -> None:
    """Compile the kernels that are missing once no other process compiles. Raises NodeError if one is missing then."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        for kernel in missing_kernels(kernels, capability):
            compile_one(kernel)
    if missing_kernels(kernels, capability):
        raise NodeError(f"no record of the compiled kernels can be kept in {folder}")
