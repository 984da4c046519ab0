"""UCX, the library under NIXL: its settings and its log."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.rpc.timeouts import PeerTiming

logger = logging.getLogger(__name__)

DEBUG_SIGNAL_OFF = {"UCX_DEBUG_SIGNO": "0"}  # otherwise UCX handles SIGHUP
#: Otherwise UCX reads over TCP where it finds no NVLink: between GPUs on PCIe, and between two nodes on one GPU.
READS_OVER_CUDA_IPC = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
#: UCX never uses these for NIXL, as they do not detect the death of a peer. But it makes their segments, and a process
#: that is killed before it has removed the names leaves 4 MB in /dev/shm, or a System V segment, until the next boot.
NO_NAMED_SEGMENTS = {"UCX_TLS": "^posix,sysv"}

_LOG_LINE = re.compile(r"\[[\d.]+\] \[[^\]]*\] +\S+ +UCX +(?P<level>[A-Z]+) +(?P<text>.*)")
_LANES = re.compile(r"(?P<worker>.*) (intra|inter)-node cfg#\d+ (?P<lanes>.*)")
# Errors reach callers as exceptions.
_LEVELS = {"FATAL": logging.CRITICAL, "ERROR": logging.WARNING, "WARN": logging.WARNING}


class UcxLog:
    """UCX's log, forwarded to ``logging``. It is the only source of the lanes of connections.

    UCX opens its log once per process. An anonymous file in memory vanishes with the process.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, str] = {}  # lanes logged last, by worker
        self._file = os.memfd_create("ucx-log", os.MFD_CLOEXEC)
        self._read = 0  # bytes forwarded so far
        self._lock = threading.Lock()

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self._file}"

    def take_lanes(self, worker: str) -> str:
        """Remove and return the lanes of the last connection of a worker, given by a prefix of its name; "" if unknown.

        A worker logs the lanes of a connection only if they are the first such lanes.
        """
        self.forward()
        with self._lock:
            names = [name for name in self._lanes if name.startswith(worker)]
            return [self._lanes.pop(name) for name in names][-1] if names else ""

    def forward(self) -> None:
        """Log the lines that UCX has written since the last call."""
        with self._lock:
            ctypes.CDLL(None).fflush(None)  # UCX writes through a buffered stream
            data = os.pread(self._file, os.fstat(self._file).st_size - self._read, self._read)
            whole = data[: data.rfind(b"\n") + 1]
            self._read += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                self._forward_line(line)

    def _forward_line(self, line: str) -> None:
        match = _LOG_LINE.match(line)
        if match is None:
            logger.debug("%s", line)
            return
        logger.log(_LEVELS.get(match["level"], logging.DEBUG), "%s", match["text"])
        lanes = _LANES.match(match["text"])
        if lanes:
            self._lanes[lanes["worker"]] = " ".join(lanes["lanes"].split())


_log: UcxLog | None = None
_log_lock = threading.Lock()
_settings_lock = threading.RLock()


def log() -> UcxLog:
    global _log
    with _log_lock:
        if _log is None:
            _log = UcxLog()
        return _log


@contextmanager
def settings(timing: PeerTiming) -> Iterator[None]:
    """Set UCX's environment variables while it starts, except those that the user has set.

    They are removed afterwards: processes started later must not take them for the user's. Other threads wait.
    """
    with _settings_lock:
        yield from _settings(timing)


def _settings(timing: PeerTiming) -> Iterator[None]:
    defaults = timing.ucx_settings | DEBUG_SIGNAL_OFF | NO_NAMED_SEGMENTS
    if cuda_driver_version():  # without its CUDA transports, UCX warns about their settings
        defaults |= READS_OVER_CUDA_IPC
    if "UCX_LOG_FILE" not in os.environ and "UCX_LOG_LEVEL" not in os.environ:
        defaults |= {"UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": log().path}
    added = [name for name in defaults if name not in os.environ]
    os.environ.update({name: defaults[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@functools.cache
def cuda_driver_version() -> int:
    """Return the newest CUDA version of the driver, 12080 for 12.8; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no GPU driver on this machine
        return 0
    version = ctypes.c_int(0)
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0
