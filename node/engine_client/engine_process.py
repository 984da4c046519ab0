"""The engine's process as its frontend has it: messages in both directions, output and end.

    frontend (asyncio, gRPC)                       engine process (step loop)
      EngineProcess ─── Unix socket pair, messages of pdserve/ipc/messages.py ──── Channel
                 ◄──── another one, for heartbeats
                 ◄──── stdout and stderr, passed through line by line

The frontend ends the process within a bound. When a frontend is killed, its socket closes, which ends the engine, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import IO

from node.engine_client.launched_engine import LaunchedEngine
from pdserve.errors import EngineDied
from pdserve.host.process import describe_exit, killed_from_outside
from pdserve.ipc.frames import Frames, framed
from pdserve.ipc.messages import FromEngine, Shutdown, ToEngine
from pdserve.logs import chosen_format, message_of, relayed_line

_LAST_LINES = 20  # last lines of the engine's stderr, kept for the error when it exits
_EXIT_GRACE = 2.0  # seconds between the end of the socket and SIGKILL


class EngineProcess:
    """One process. ``on_exit`` is called once it has ended and its output was passed through."""

    def __init__(self, on_message: Callable[[FromEngine], None], on_exit: Callable[[EngineDied], None]) -> None:
        self._on_message = on_message
        self._on_exit = on_exit
        self.killed_from_outside = False  # valid once the process has ended
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._watch: asyncio.Task[None] | None = None
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._all_received = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def pid(self) -> int | None:
        """Process id; None before ``take_over``."""
        return None if self._process is None else self._process.pid

    async def take_over(self, launched: LaunchedEngine) -> None:
        """Connect to a process, which waits for a Configure."""
        process = self._process = launched.process
        self._watch = asyncio.create_task(self._watch_process(process), name="engine watch")
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(
            lambda: _EngineProtocol(self._on_message, partial(self._on_last_message, process), self._writable),
            sock=launched.messages,
        )
        await loop.create_connection(
            lambda: _EngineProtocol(self._on_message, lambda: None, asyncio.Event()), sock=launched.heartbeats
        )

    def send(self, message: ToEngine) -> bool:
        """Queue a message. Return False if it is dropped: the process has ended."""
        if self._transport is None or self._transport.is_closing():
            return False
        self._transport.write(framed(message))
        return True

    async def room(self) -> None:
        """Wait until the process has taken most of the bytes that were sent, or has ended."""
        await self._writable.wait()

    async def end(self, seconds: float) -> None:
        """End the process: request, terminate, kill. Takes little more than twice ``seconds``. Idempotent."""
        if self._process is None or self._watch is None:
            return
        self.send(Shutdown())
        for force in (self._process.terminate, self._process.kill):
            done, _ = await asyncio.wait([self._watch], timeout=seconds)
            if done:
                break
            force()
        await self._watch
        if self._transport is not None:
            self._transport.close()

    def _on_last_message(self, process: subprocess.Popen[bytes]) -> None:
        self._all_received.set()
        _end_soon(process)

    async def _watch_process(self, process: subprocess.Popen[bytes]) -> None:
        """Relay the output until the process exits."""
        assert process.stdout is not None
        in_json = chosen_format() == "json"
        async for line in _lines(process.stdout):
            print(relayed_line(line, {"process": "engine"}) if in_json else line, file=sys.stderr, flush=True)
            if line.strip():
                self._last_lines.append(message_of(line))
        status = await asyncio.to_thread(process.wait)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_received.wait(), _EXIT_GRACE)
        self.killed_from_outside = killed_from_outside(status)
        self._on_exit(EngineDied(_exit_reason(status, self._last_lines)))


def _end_soon(process: subprocess.Popen[bytes]) -> None:
    """Kill an engine that has closed its socket, unless it exits."""

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):  # the process has just exited
            process.kill()

    if process.poll() is None:
        asyncio.get_running_loop().call_later(_EXIT_GRACE, kill)


async def _lines(pipe: IO[bytes]) -> AsyncIterator[str]:
    """Yield lines of any length, without line ends."""
    loop = asyncio.get_running_loop()
    stream = asyncio.StreamReader()
    rest = b""
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
    with contextlib.closing(transport):
        while chunk := await stream.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace")
        if rest:
            yield rest.decode(errors="replace")


class _EngineProtocol(asyncio.Protocol):
    def __init__(
        self, on_message: Callable[[FromEngine], None], on_end: Callable[[], None], writable: asyncio.Event
    ) -> None:
        """``writable`` is set while few bytes wait to be sent."""
        self._on_message = on_message
        self._on_end = on_end
        self._writable = writable
        self._frames: Frames[FromEngine] = Frames(FromEngine)

    def data_received(self, data: bytes) -> None:
        for message in self._frames.cut(data):
            self._on_message(message)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        self._on_end()


def _exit_reason(returncode: int, last_lines: deque[str]) -> str:
    last = f"; its last output: {last_lines[-1]}" if last_lines else ""
    return f"the engine process {describe_exit(returncode)}{last}"
