"""NIXL's POSIX back end: transfers between registered memory and open files, by asynchronous I/O of the kernel."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from connector.backends.file_spans import Span
from connector.backends.nixl.agent import errors_of, load_library
from pdserve.errors import CapacityError

_FIRST_WAIT = 50e-6  # seconds between looks at a transfer
_LONGEST_WAIT = 2e-3  # seconds


class NixlFiles:
    """Implements FileTransfer. Raises ConfigError without NIXL, CapacityError if the back end cannot start."""

    def __init__(self, name: str) -> None:
        self._lib = load_library()
        self._errors = errors_of(self._lib)
        self._name = name
        self._registered: set[int] = set()  # addresses
        config = self._lib.nixlAgentConfig()
        config.useProgThread = False
        config.syncMode = self._lib.NIXL_THREAD_SYNC_NONE
        try:
            self._agent = self._lib.nixlAgent(name, config)
            self._backend = self._agent.createBackend("POSIX", {})
        except self._errors as error:
            raise CapacityError(f"NIXL agent {name} has no POSIX back end: {error}") from error

    def register(self, address: int, num_bytes: int) -> None:
        if address in self._registered:
            return
        entry = (address, num_bytes, 0, "")
        try:
            self._agent.registerMem(self._lib.nixlRegDList(self._lib.DRAM_SEG, [entry]), [self._backend])
        except self._errors as error:
            raise CapacityError(f"NIXL cannot register {num_bytes} B of memory for files: {error}") from error
        self._registered.add(address)

    def move(self, spans: Sequence[Span], read: bool) -> str:
        """NIXL has one status for all spans. It reports an error when no byte is on its way any more."""
        lib = self._lib
        files = lib.nixlRegDList(lib.FILE_SEG, [(0, span.num_bytes, span.fd, "") for span in spans])
        try:
            self._agent.registerMem(files, [self._backend])
            try:
                return self._transfer(spans, lib.NIXL_READ if read else lib.NIXL_WRITE)
            finally:
                self._agent.deregisterMem(files, [self._backend])
        except self._errors as error:
            return str(error)

    def _transfer(self, spans: Sequence[Span], operation: Any) -> str:
        lib = self._lib
        agent = self._agent
        memory = lib.nixlXferDList(lib.DRAM_SEG, [(span.address, span.num_bytes, 0) for span in spans])
        files = lib.nixlXferDList(lib.FILE_SEG, [(0, span.num_bytes, span.fd) for span in spans])
        handle = agent.createXferReq(operation, memory, files, self._name, "", [self._backend])
        try:
            status = agent.postXferReq(handle, "")
            wait = _FIRST_WAIT
            while status == lib.NIXL_IN_PROG:
                time.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
                status = agent.getXferStatus(handle)
        finally:
            agent.releaseXferReq(handle)
        return "" if status == lib.NIXL_SUCCESS else str(status)
