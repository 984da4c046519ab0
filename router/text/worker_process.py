"""Worker processes for work that may hang or fill the memory: the router kills such a worker and goes on.

Before each message on a worker's standard input and output comes its length, LENGTH_BYTES long and little-endian. A
worker answers one message at a time and exits when its input ends.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Generic, Protocol, TypeVar

from router.text.fair_slots import FairSlots

_LENGTH_BYTES = 4
_START_SECONDS = 60.0  # seconds; a large vocabulary takes one or two
_END_SECONDS = 1.0  # for a process to end once its output has ended


class WorkerProcess:
    """The router's end of a worker. Its methods raise EOFError or OSError when the process has ended."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, module: str, setup: bytes, stderr: int | None = None, pass_fds: Sequence[int] = ()
    ) -> tuple[WorkerProcess, bytes]:
        """Run a module and return the worker with its answer to the first message. Raises TimeoutError."""
        argv = (sys.executable, "-P", "-m", module)
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=PIPE, stdout=PIPE, stderr=stderr, limit=1 << 20, pass_fds=pass_fds
        )
        worker = cls(process)
        try:
            return worker, await worker.exchange(setup, _START_SECONDS)
        except BaseException:
            await worker.kill()
            raise

    @property
    def status(self) -> int | None:
        """Exit status of the process; below 0, the number of the signal that has killed it; None while it runs."""
        return self._process.returncode

    async def exchange(self, message: bytes, seconds: float) -> bytes:
        """Return the answer to a message. Raises TimeoutError; then, and when cancelled, the worker must be killed."""
        stdin = self._process.stdin
        stdout = self._process.stdout
        assert stdin is not None
        assert stdout is not None
        async with asyncio.timeout(seconds):
            try:
                try:
                    stdin.write(packed(message))
                except RuntimeError as exc:  # uvloop raises RuntimeError when the process has ended
                    raise EOFError from exc
                await stdin.drain()
                length = int.from_bytes(await stdout.readexactly(_LENGTH_BYTES), "little")
                return await stdout.readexactly(length)
            except (EOFError, OSError):
                with suppress(TimeoutError):
                    async with asyncio.timeout(_END_SECONDS):
                        await self._process.wait()  # a signal meanwhile would lose its exit status
                raise

    async def kill(self) -> None:
        """Idempotent."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


class Worker(Protocol):
    """A process, with what belongs to it."""

    async def kill(self) -> None:
        """Idempotent."""


WorkerT = TypeVar("WorkerT", bound=Worker)


class WorkerPool(Generic[WorkerT]):
    """Up to ``most`` workers, started on demand. Clients share them fairly."""

    def __init__(self, start: Callable[[], Awaitable[WorkerT]], most: int) -> None:
        self._start = start
        self._slots = FairSlots(most)
        self._idle: list[WorkerT] = []
        self._all: set[WorkerT] = set()

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[WorkerT]:
        """Wait for a worker. After an exception it is killed: a late answer would be taken for that of a later message.

        Raises the errors of ``start``.
        """
        async with self._slots.slot():
            worker = self._idle.pop() if self._idle else await self._start()
            self._all.add(worker)
            try:
                yield worker
            except BaseException:
                self._all.discard(worker)
                await worker.kill()
                raise
            self._idle.append(worker)

    async def close(self) -> None:
        """Kill all workers."""
        await asyncio.gather(*(worker.kill() for worker in self._all))


def packed(message: bytes) -> bytes:
    """Return a message with its length before it."""
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message


def unpacked(data: bytes) -> bytes:
    """Return the only message in ``data``."""
    return data[_LENGTH_BYTES:]


def read_message() -> bytes | None:
    """Read the next message in the worker; None at the end of its input."""
    length = sys.stdin.buffer.read(_LENGTH_BYTES)
    return sys.stdin.buffer.read(int.from_bytes(length, "little")) if length else None


def write_message(message: bytes) -> None:
    sys.stdout.buffer.write(packed(message))
    sys.stdout.buffer.flush()
