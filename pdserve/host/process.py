"""Exit statuses and one-line errors of all commands; status lines and lifelines between a parent and its children.

pdserve up ──spawns──► node          status fd    {"state": "ready"} …  one JSON object per line, from the child
                                     lifeline fd  carries nothing; its end means that the parent has exited
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

from pdserve.errors import CapacityError, ConfigError, PdserveError
from pdserve.logs import chosen_format, json_line

EXIT_FAILED = 1  # the process failed while running
EXIT_REFUSED = 2  # the process cannot run with this configuration, checkpoint, memory or port
EXIT_ORPHANED = 3  # the parent has exited
EXIT_INTERRUPTED = 130  # as a shell reports SIGINT
EXIT_BROKEN_PIPE = 141  # as a shell reports SIGPIPE

_PR_SET_PDEATHSIG = 1  # prctl(2)


class StatusWriter:
    """Writes startup progress to the parent; does nothing without a file descriptor or after the reader has gone."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._has_failed = False

    @property
    def has_reader(self) -> bool:
        return self._fd is not None

    def listening(self, address: str) -> None:
        """The port is bound; ``address`` is the host:port for others to connect to."""
        self._write(state="listening", address=address)

    def loading(self, stage: str, fraction: float) -> None:
        """``fraction`` is 0 … 1 of this stage, or -1 where unknown."""
        self._write(state="loading", stage=stage, fraction=round(fraction, 4))

    def ready(self, kv_tokens: int = 0) -> None:
        """``kv_tokens`` is the size of the KV cache of a node."""
        self._write(state="ready", kv_tokens=kv_tokens)

    def failed(self, error: BaseException) -> None:
        """The process is going to end for this error; only the first one counts."""
        if not self._has_failed:
            self._has_failed = True
            self._write(state="failed", error=one_line(error), status=exit_status(error))

    def _write(self, **fields: str | float) -> None:
        if self._fd is None:
            return
        line = json.dumps(fields).encode() + b"\n"
        try:
            os.write(self._fd, line)  # shorter than PIPE_BUF, so lines never mix
        except OSError:  # the reader has gone; the lifeline decides whether to exit
            self._fd = None


def watch_lifeline(fd: int | None) -> None:
    """Exit at once when the other end of ``fd`` is closed, also when the parent was killed."""
    if fd is None:
        return

    def watch() -> None:
        try:
            while os.read(fd, 4096):
                pass
        except OSError as exc:
            print(f"pdserve: lifeline fd {fd} is unusable: {exc}", file=sys.stderr, flush=True)
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent exits, even while it is stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def one_line(error: BaseException) -> str:
    """Return the error as one line; an error outside pdserve.errors begins with its class."""
    text = " ".join(str(error).split())
    if isinstance(error, PdserveError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def log_failure(log: logging.Logger, error: BaseException) -> None:
    """Log the error that ends this process; with its traceback unless it is one of pdserve.errors."""
    log.error("%s", one_line(error), exc_info=None if isinstance(error, PdserveError) else error)


def describe_exit(status: int) -> str:
    """Return how a process ended, given its return code; below 0 it is a signal's number."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def killed_from_outside(status: int) -> bool:
    """Whether a return code is a signal from another process: an order, or the OOM killer."""
    return -status in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def exit_status(error: BaseException) -> int:
    return EXIT_REFUSED if isinstance(error, ConfigError | CapacityError) else EXIT_FAILED


def run_command(command: Callable[[], int]) -> int:
    """Return the status of ``command``; print an exception as one line. ``PDSERVE_TRACEBACK=1`` adds the traceback."""
    try:
        _check_byte_order()
        status = command()
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has ended, such as ``head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the flush at exit must not fail
        return EXIT_BROKEN_PIPE
    except Exception as exc:
        hint = "" if isinstance(exc, PdserveError) else " (set PDSERVE_TRACEBACK=1 for a traceback)"
        stack = os.environ.get("PDSERVE_TRACEBACK", "0") not in ("", "0")
        say(f"pdserve: error: {one_line(exc)}{hint}", traceback.format_exc() if stack else "")
        return exit_status(exc)


def _check_byte_order() -> None:
    """Raise ConfigError on a big-endian machine: token ids, block hashes and messages are little-endian in memory."""
    if sys.byteorder != "little":
        raise ConfigError(f"this machine is {sys.byteorder}-endian; pdserve runs on little-endian machines only")


def say(text: str, stack: str = "", level: str = "CRITICAL") -> None:
    """Print a line on stderr regardless of the log level, as JSON if that is the log format."""
    if chosen_format() == "json":
        text = json_line(level, "pdserve", text, None, {"stack": stack} if stack else {})
        stack = ""
    print(text, stack, sep="\n" if stack else "", end="" if stack else "\n", file=sys.stderr, flush=True)
