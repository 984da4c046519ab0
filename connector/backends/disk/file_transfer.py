"""Moves bytes between memory and open files: through NIXL's POSIX back end where it works, else by plain calls."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from connector.backends.disk.kv_directory import make_private
from connector.backends.file_spans import FileTransfer, Span
from pdserve.errors import PdserveError

_log = logging.getLogger(__name__)


class NoTransfer:
    """The FileTransfer of a process where NIXL moves no files: plain calls do all."""

    def register(self, address: int, num_bytes: int) -> None:
        """Any memory will do."""

    def move(self, spans: Sequence[Span], read: bool) -> str:
        return "no NIXL"


def move_plainly(span: Span, read: bool) -> str:
    """Read a file into memory, or write it, by plain calls. Return an error, or an empty string: all bytes moved."""
    memory = memoryview((ctypes.c_char * span.num_bytes).from_address(span.address)).cast("B")
    done = 0
    try:
        while done < span.num_bytes:
            rest = memory[done:]
            moved = os.preadv(span.fd, [rest], done) if read else os.pwritev(span.fd, [rest], done)
            if not moved:
                return f"{done} of {span.num_bytes} bytes were moved"
            done += moved
    except OSError as exc:
        return str(exc)
    return ""


def open_transfer(agent: str, folder: Path) -> FileTransfer:
    """Return a transfer of NIXL if that moves bytes to a file in ``folder`` and back, else plain calls."""
    from connector.backends.nixl.file_agent import NixlFiles

    try:
        transfer = NixlFiles(agent)
        problem = _try(transfer, folder)
    except PdserveError as exc:
        problem = str(exc)
    except OSError as exc:
        _log.debug("NIXL's POSIX back end could not be tried in %s: %s", folder, exc)
        return NoTransfer()
    if not problem:
        return transfer
    _log.info("KV on disk: plain file calls, since NIXL's POSIX back end does not work here: %s", problem)
    return NoTransfer()


def _try(transfer: FileTransfer, folder: Path) -> str:
    """Write bytes to a file and read them. Return the error, or an empty string. Raises OSError, PdserveError."""
    size = mmap.PAGESIZE
    content = os.urandom(size)
    memory = mmap.mmap(-1, 2 * size)
    memory[:size] = content
    source = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    transfer.register(source, 2 * size)
    make_private(folder)
    with tempfile.TemporaryFile(dir=folder) as file:
        error = transfer.move([Span(file.fileno(), source, size)], read=False)
        error = error or transfer.move([Span(file.fileno(), source + size, size)], read=True)
    if error:
        return error
    return "" if memory[size:] == content else "what was read is not what was written"
